#!/usr/bin/env bash
# Measures every speed of inference that the paper publishes (arXiv 2501.06589), and ends in one report:
#
#     bash examples/paper/speed.sh FOLDER                       on one machine with 8 GPUs: all but 405B
#     bash examples/paper/speed.sh FOLDER --hosts "A B"         on the first of two such hosts: 405B, over ssh with pdsh
#     bash examples/paper/speed.sh FOLDER --hosts "A B" --node-rank N    on each of them, N = 0 on the first: without ssh
#     bash examples/paper/speed.sh FOLDER --tiny                toy shapes on two CPU cores, over an emulated interconnect
#
# Weights are random, so nothing is downloaded. Started again, it measures what is missing in FOLDER, which hosts share.
# Further flags: --only "SIZES" (of those in `sizes` below), --rounds N (default 7), --master-port N. --dry-run prints the
# commands. FOLDER/report.md has our figures, the paper's and the model's.
set -euo pipefail

beginning=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/hosts.sh

# Those of the paper's 1B, 3B, 8B, 34B, 70B, 176B and 405B, and its two deeper ladders.
sizes=(paper-1.2b paper-3.5b-tp8 llama-8b llama-34b llama-70b bloom-176b llama-405b paper-1.5b paper-4.5b-tp8)
folder="" hosts="" only="" rounds=7 tiny=false dry_run=false
gpus_per_host=8 master_port=29500 node_rank=""
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' examples/paper/speed.sh
            exit 0
            ;;
        --tiny | --dry-run)
            [ "$1" = --tiny ] && tiny=true || dry_run=true
            shift
            continue
            ;;
        --*) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
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

# measure SIZE P2P BATCH: writes FOLDER/SIZE-p2p-P2P-batch-BATCH-prefill.json and -decode.json, unless they exist. Decoding
# is timed at the mean number of positions.
measure() {
    local size=$1 p2p=$2 batch=$3 case name status command positions
    for case in prefill decode; do
        name=$size-p2p-$p2p-batch-$batch-$case
        [ "$case" = prefill ] && positions=1024 || positions=1280
        command=(tools/benchmark.py "$case" --sizes "$(shape "$size")" --batch "$batch" --rounds "$rounds"
            --wirings standard ladder hybrid parallel ladder-parallel --json "$folder/$name.json")
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
        if [ -e "$folder/$name.json" ]; then
            echo "$name: already measured"
            continue
        fi
        if "$dry_run"; then
            printf '%q ' "${command[@]}" && echo
            continue
        fi
        printf '\n%s\n' "$name"
        status=0
        "${command[@]}" || status=$?
        # 3: measured, but a ratio is too noisy to judge, which the report repeats.
        [ "$status" -eq 0 ] || [ "$status" -eq 3 ] || exit "$status"
    done
}

"$dry_run" || mkdir -p "$folder"
if [ ${#host_names[@]} -gt 0 ]; then
    "$dry_run" || require_launcher
    build_launcher
fi
for size in ${only:-"${sizes[@]}"}; do
    batches=(4)
    [ "$size" != llama-70b ] || batches=(1 4 16 64)
    for batch in "${batches[@]}"; do
        measure "$size" on "$batch"
        # The deeper ladders were published with P2P alone.
        [[ $size == paper-1.5b || $size == paper-4.5b-tp8 ]] || measure "$size" off "$batch"
    done
done
"$dry_run" || [ "${node_rank:-0}" != 0 ] || python3 examples/paper/speed_report.py "$folder"
