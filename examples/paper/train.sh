#!/usr/bin/env bash
# Starts one of the paper's from-scratch runs (arXiv 2501.06589), or one of ours, on several hosts. Edit settings.sh in
# this folder, run prepare.sh once, and then
#
#     bash examples/paper/train.sh --size 1.2b --wiring ladder        on the first host: starts all hosts over ssh with pdsh
#     bash examples/paper/train.sh ... --node-rank N                  on every host, N = 0 on the first: without ssh
#     sbatch examples/paper/train.sbatch --size 1.2b ...              slurm
#     bash examples/paper/train.sh ... --dry-run                      prints the command
#     bash examples/paper/train.sh --tiny FOLDER --wiring ladder      a toy run: two processes on this machine, no GPU
#
# Sizes: 1.2b, 1.5b, 3.5b, 4.5b, and 3.5b-tp8 and 4.5b-tp8 with 32 heads instead of 36. Wirings: standard, parallel,
# ladder, ladder-parallel, staleness-2, hybrid, desync-2x, desync-4x. Started again, a run resumes from its last
# checkpoint. Further flags: --tp N (tensor-parallel GPUs, default 1; the desync wirings need 2 or more, and N is part of
# their model), --run FOLDER (default: a subfolder of `runs` in settings.sh), --hosts "A B", --gpus-per-host N, --master-port N. Flags after -- go to pretrain_ladder.py and
# override the recipe.
set -euo pipefail

beginning=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/hosts.sh
source examples/paper/settings.sh

size=1.2b wiring="" tp="" run="" folder=""
master_port=29500 node_rank="" dry_run=false
training_flags=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' examples/paper/train.sh
            exit 0
            ;;
        --dry-run)
            dry_run=true
            shift
            continue
            ;;
        --)
            training_flags=("${@:2}")
            break
            ;;
        --*) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --size) size=$2 ;;
        --wiring) wiring=$2 ;;
        --tp) tp=$2 ;;
        --run) run=$2 ;;
        --tiny) folder=$2 size=tiny ;;
        --hosts) hosts=$2 ;;
        --gpus-per-host) gpus_per_host=$2 ;;
        --master-port) master_port=$2 ;;
        --node-rank) node_rank=$2 ;;
        *) fail "$1: unknown flag: see --help; flags of pretrain_ladder.py go after --" ;;
    esac
    shift 2
done
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$beginning/$1"; }

if [ "$size" = tiny ]; then
    [ -n "$folder" ] || fail "--size tiny: give --tiny FOLDER instead"
    hosts=localhost gpus_per_host=2 tp=${tp:-2}
    folder=$(absolute "$folder")
    source examples/paper/tiny.sh
fi
asked=(--size "$size" --tp "${tp:-1}")
[ -z "$wiring" ] || asked+=(--wiring "$wiring")
flags=$(python3 examples/paper/runs.py "${asked[@]}")
mapfile -t words <<<"$flags"
run=$(absolute "${run:-$runs/$size-$wiring}")

if [ "$size" = tiny ]; then
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    launcher=(deepspeed --quiet --hostfile /dev/null --num_gpus "$gpus_per_host" --master_port "$port")
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
else
    build_launcher
fi
command=("${launcher[@]}" pretrain_ladder.py "${words[@]}"
    --streaming "${training_texts[@]}" --valid-data-path "${held_out}_text_document" "${tokenizer[@]}"
    --save "$run" --load "$run" --tensorboard-dir "$run/tensorboard"
    ${training_flags[@]+"${training_flags[@]}"})

if "$dry_run"; then
    read -ra names <<<"$hosts"
    printf '%d processes: %d on each of %s\n' $((${#names[@]} * gpus_per_host)) "$gpus_per_host" "$hosts"
    printf '%q ' "${command[@]}" && echo
    exit 0
fi
if [ "$size" = tiny ]; then
    [ -e "${held_out}_text_document.json" ] || bash examples/paper/prepare.sh --tiny "$folder"
else
    require_launcher
    [ -e "${held_out}_text_document.json" ] || fail "${held_out}_text_document.json: not found: run examples/paper/prepare.sh"
fi
"${command[@]}" || echo "the launcher ended with exit code $?" >&2
# Launchers lose the exit codes of their ranks; the record of the run has them.
python3 tools/report_run.py --status "$run"
