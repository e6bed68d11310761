#!/usr/bin/env bash
# Evaluates models on the paper's tasks with lm-eval, and writes a table with the published results. Install lm-eval with
# pip install "lm-eval[hf,ifeval]".
#
#     bash examples/paper/evaluate.sh --size 1.2b --wiring ladder      a run of train.sh
#     bash examples/paper/evaluate.sh --adapted DIR --source DIR       what adapt.sh wrote (its --run), and its source
#     bash examples/paper/evaluate.sh ... --dry-run                    prints the commands
#
# The newest checkpoint is exported for transformers; a desync run is read as it is, on --tp N
# processes as in training. Started again, the script skips finished tasks. Further flags: --run FOLDER (default: a
# subfolder of `runs` in settings.sh). Flags after -- go to evaluations.py: --tasks, --limit N, --batch-size N,
# --chat-template, and --run-code for HumanEval+. AlpacaEval 2 needs another program and an API key, and is not run.
set -euo pipefail

beginning=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/hosts.sh
source examples/paper/settings.sh

size="" wiring="" adapted="" source_model="" run="" tp=1 dry_run=()
evaluation_flags=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' examples/paper/evaluate.sh
            exit 0
            ;;
        --dry-run)
            dry_run=(--dry-run)
            shift
            continue
            ;;
        --)
            evaluation_flags=("${@:2}")
            break
            ;;
        --*) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --size) size=$2 ;;
        --wiring) wiring=$2 ;;
        --adapted) adapted=$2 ;;
        --source) source_model=$2 ;;
        --run) run=$2 ;;
        --tp) tp=$2 ;;
        *) fail "$1: unknown flag: see --help; flags of evaluations.py go after --" ;;
    esac
    shift 2
done
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$beginning/$1"; }

# export_once CHECKPOINTS DIR: exports the newest checkpoint unless DIR is complete and not older.
export_once() {
    local command=(python3 tools/convert_checkpoint.py export --load "$1" --hf "$2" --dtype bf16 --overwrite)
    if [ -e "$2/config.json" ] && ! [ "$1/latest" -nt "$2/config.json" ]; then
        return
    fi
    printf '%q ' "${command[@]}" && echo
    [ ${#dry_run[@]} -gt 0 ] || "${command[@]}"
}

# newest CHECKPOINTS FLAG: prints the name of the newest checkpoint.
newest() {
    [ -f "$1/latest" ] || fail "$2: no checkpoint in $1: train first, or pass another folder"
    cat "$1/latest"
}

if [ -n "$adapted" ]; then
    [ -z "$size$wiring$run" ] || fail "--adapted $adapted: remove --size, --wiring and --run, which select a run of train.sh"
    adapted=$(absolute "$adapted")
    table=adaptation
    iteration=$(newest "$adapted/checkpoints" --adapted)
    output=$adapted/evaluation/paper-$iteration
    [ -e "$adapted/healed/config.json" ] || fail "--adapted $adapted: no healed/config.json in it: run adapt.sh to its end"
    layers=$(python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["ladder_layers"]))' \
        "$adapted/healed/config.json")
    # With --lanes, healing began with the arranged model.
    unhealed=$adapted/imported
    [ ! -e "$adapted/arranged/latest" ] || unhealed=$adapted/arranged
    export_once "$unhealed" "$adapted/unhealed"
    models=("$layers-unhealed=$adapted/unhealed" "$layers-healed=$adapted/healed")
    [ -z "$source_model" ] || models=("source=$(absolute "$source_model")" "${models[@]}")
else
    [ -n "$size" ] && [ -n "$wiring" ] || fail "--size and --wiring are required, as for train.sh; or --adapted DIR"
    [ -z "$source_model" ] || fail "--source $source_model: has no meaning without --adapted: remove it"
    table=from-scratch
    run=$(absolute "${run:-$runs/$size-$wiring}")
    iteration=$(newest "$run" "--size $size --wiring $wiring")
    output=$run/evaluation/$iteration
    model=$output/exported
    if [[ $wiring == desync-* ]]; then
        [ "$tp" -gt 1 ] || fail "--tp $tp: --wiring $wiring has one stream per process: pass --tp of the training run"
        model=$run
    else
        export_once "$run" "$model"
    fi
    models=("$size-$wiring=$model")
fi
python3 examples/paper/evaluations.py --table "$table" --models "${models[@]}" --output "$output" --tp "$tp" \
    ${dry_run[@]+"${dry_run[@]}"} ${evaluation_flags[@]+"${evaluation_flags[@]}"}
