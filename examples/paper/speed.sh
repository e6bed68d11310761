#!/usr/bin/env bash
# Measures every speed of inference that the paper publishes (arXiv 2501.06589), and ends in one report:
#
#     bash examples/paper/speed.sh FOLDER                       on one machine with 8 GPUs: all but 405B
#     bash examples/paper/speed.sh FOLDER --hosts "A B"         on the first of two such hosts: 405B, over ssh with pdsh
#     bash examples/paper/speed.sh FOLDER --hosts "A B" --node-rank N    on each of them, N = 0 on the first: without ssh
#     bash examples/paper/speed.sh FOLDER --one-gpu             on one GPU, which plays one of 8: 8B and 70B
#     bash examples/paper/speed.sh FOLDER --tiny                toy shapes on two CPU cores, over an emulated interconnect
#
# Weights are random, so nothing is downloaded. Started again, it measures what is missing in FOLDER, which hosts share.
# Further flags: --only "SIZES" (of those in `sizes` below), --rounds N (default 7), --master-port N. --dry-run prints the
# commands. FOLDER/report.md has our figures, the paper's and the model's. With --one-gpu, all-reduces last as long as
# those that others measured between 8 H100, and the report compares ladder with the paper only if standard is as fast
# as it has to be (see `ACCEPTED` in speed_report.py).
set -euo pipefail

beginning=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/hosts.sh

# Those of the paper's 1B, 3B, 8B, 34B, 70B, 176B and 405B, and its two deeper ladders.
sizes=(paper-1.2b paper-3.5b-tp8 llama-8b llama-34b llama-70b bloom-176b llama-405b paper-1.5b paper-4.5b-tp8)
folder="" hosts="" only="" rounds=7 tiny=false one_gpu=false dry_run=false failed=0
gpus_per_host=8 master_port=29500 node_rank=""
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' examples/paper/speed.sh
            exit 0
            ;;
        --tiny | --one-gpu | --dry-run)
            case $1 in
                --tiny) tiny=true ;;
                --one-gpu) one_gpu=true ;;
                *) dry_run=true ;;
            esac
            shift
            continue
            ;;
        --hosts | --node-rank | --only | --rounds | --master-port)
            [ $# -gt 1 ] || fail "$1: a value is missing"
            ;;&
        --hosts) hosts=$2 ;;
        --node-rank) node_rank=$2 ;;
        --only) only=$2 ;;
        --rounds) rounds=$2 ;;
        --master-port) master_port=$2 ;;
        --*) fail "$1: unknown flag: see --help" ;;
        *)
            [ -z "$folder" ] || fail "$1: expected one folder, found $folder before it"
            [[ $1 == /* ]] && folder=$1 || folder=$beginning/$1
            shift
            continue
            ;;
    esac
    shift 2
done
[ -n "$folder" ] || fail "a folder for the results is missing: see --help"
[[ $rounds =~ ^[0-9]+$ && $rounds -ge 4 ]] || fail "--rounds $rounds: expected 4 or more"
[ -z "$node_rank" ] || [ -n "$hosts" ] || fail "--node-rank $node_rank: give --hosts as well, or leave it out"
! "$one_gpu" || sizes=(llama-8b llama-70b)
! "$one_gpu" || [ -z "$hosts" ] || fail "--one-gpu: leave --hosts out"
for size in $only; do
    [[ " ${sizes[*]} " == *" $size "* ]] || fail "--only $size: expected some of ${sizes[*]}"
done
read -ra host_names <<<"$hosts"
[ ${#host_names[@]} -eq 0 ] || [ ${#host_names[@]} -eq 2 ] || fail "--hosts $hosts: expected two names"

# shape SIZE: prints what --sizes gets; a stand-in for a toy run, deeper and wider for larger models.
shape() {
    if ! "$tiny"; then
        echo "$1"
        return
    fi
    case $1 in
        paper-1.2b | paper-3.5b-tp8) echo 4x640x1280x8x8x1024 ;;
        paper-1.5b | paper-4.5b-tp8) echo 5x640x1280x8x8x1024 ;;
        llama-8b | llama-34b) echo 4x768x1536x8x4x1024 ;;
        *) echo 5x768x1536x8x4x1024 ;;
    esac
}

wirings=(standard ladder hybrid parallel ladder-parallel)

# measure SIZE P2P BATCH: writes FOLDER/SIZE-p2p-P2P-batch-BATCH-prefill.json and -decode.json, unless they exist. Decoding
# is timed at the mean number of positions.
measure() {
    local size=$1 p2p=$2 batch=$3 case command positions
    for case in prefill decode; do
        [ "$case" = prefill ] && positions=1024 || positions=1280
        command=(tools/benchmark.py "$case" --sizes "$(shape "$size")" --batch "$batch" --rounds "$rounds"
            --wirings "${wirings[@]}")
        if "$tiny"; then
            command=(python3 "${command[@]}" --sequence 8 --alpha "$([ "$p2p" = on ] && echo 0.5c || echo 1c)")
        elif [ "$size" = llama-405b ]; then
            [ ${#host_names[@]} -eq 2 ] || return 0
            command=("${launcher[@]}" "${command[@]}" --device cuda --tp 16 --sequence "$positions")
        else
            [ ${#host_names[@]} -eq 0 ] || return 0
            command=(python3 "${command[@]}" --device cuda --tp 8 --sequence "$positions")
        fi
        # Otherwise the host would be the limit of a prefill, which is not captured.
        "$tiny" || command+=(--compile-sub-blocks true)
        # Emulates a machine without NVLink, as the authors did; the deepspeed launcher passes it to all hosts.
        [ "$p2p" = on ] || command=(env NCCL_P2P_DISABLE=1 "${command[@]}")
        run_once "$size-p2p-$p2p-batch-$batch-$case" "${command[@]}"
    done
}

measure_on_all() {
    local size batch batches
    for size in ${only:-"${sizes[@]}"}; do
        batches=(4)
        [ "$size" != llama-70b ] || batches=(1 4 16 64)
        for batch in "${batches[@]}"; do
            measure "$size" on "$batch"
            # The deeper ladders were published with P2P alone.
            [[ $size == paper-1.5b || $size == paper-4.5b-tp8 ]] || measure "$size" off "$batch"
        done
    done
}

# measure_on_one_gpu: writes FOLDER/one-gpu-batch-BATCH-prefill.json and -decode.json, unless they exist, and -controls.json
# for one batch, with other numbers of multiprocessors and late ranks. A prefill takes long, and varies little.
measure_on_one_gpu() {
    local batch case command size
    for batch in 1 4 16 64; do
        for case in decode prefill controls; do
            [ "$case" != controls ] || [ "$batch" = 4 ] || continue
            command=(python3 tools/benchmark.py "${case/controls/decode}" --emulate --tp 8 --batch "$batch")
            case $case in
                decode) command+=(--rounds "$rounds" --alpha nvlink nvlink-one-shot 0) ;;
                prefill) command+=(--rounds 4 --alpha nvlink) ;;
                controls) command+=(--rounds 4 --alpha nvlink --comm-sms 1 8 32 --skew 0us 3us 8us) ;;
            esac
            if ! "$tiny"; then
                command+=(--device cuda --sequence "$([ "$case" = prefill ] && echo 1024 || echo 1280)")
                command+=(--compile-sub-blocks true)
            else
                command+=(--sequence 8)
            fi
            [ "$case" = controls ] && command+=(--wirings standard ladder) || command+=(--wirings "${wirings[@]}")
            command+=(--sizes)
            for size in ${only:-"${sizes[@]}"}; do
                command+=("$(shape "$size")")
            done
            run_once "one-gpu-batch-$batch-$case" "${command[@]}"
        done
    done
}

# run_once NAME COMMAND...: writes FOLDER/NAME.json, unless it exists.
run_once() {
    local name=$1 status=0
    shift
    set -- "$@" --json "$folder/$name.json"
    if [ -e "$folder/$name.json" ]; then
        echo "$name: already measured"
    elif "$dry_run"; then
        printf '%q ' "$@" && echo
    else
        printf '\n%s\n' "$name"
        "$@" || status=$?
        # 3: measured, but a ratio is too noisy to judge, which the report repeats.
        [ "$status" -ne 3 ] || status=0
        # Without other hosts to wait for, the next measurement may be one that fits the GPU.
        "$one_gpu" || [ "$status" -eq 0 ] || exit "$status"
        [ "$status" -eq 0 ] || failed=$status
    fi
}

"$tiny" || "$dry_run" || python3 -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null ||
    fail "python3 has no torch that finds a GPU: give --tiny for a rehearsal on a CPU"
"$dry_run" || mkdir -p "$folder" || fail "$folder: cannot be made: give another folder"
if [ ${#host_names[@]} -gt 0 ]; then
    "$dry_run" || require_launcher
    build_launcher
fi
if "$one_gpu"; then
    measure_on_one_gpu
else
    measure_on_all
fi
"$dry_run" || [ "${node_rank:-0}" != 0 ] || python3 examples/paper/speed_report.py "$folder"
exit "$failed"
