#!/usr/bin/env bash
# Adapts the same Llama with several numbers of ladder layers, and ends in a table and a plot of perplexity and speed:
#
#     bash examples/adapt_llama/sweep.sh FOLDER --layers "8 16 20 24 32" --link no-p2p -- FLAGS
#     bash examples/adapt_llama/sweep.sh FOLDER --tiny         a generated tiny Llama of 4 layers on two CPU cores
#
# FLAGS go to adapt.sh, which runs once for each number, in FOLDER/N. --gpu, --link, --inference-tp and --batch describe
# the machine that will serve the model, as --gpu, --link, --tp and --batch of tools/plan.py inference, which predicts the
# speed-ups. Run again, the script continues where it stopped.
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
source "$here/../environment.sh"
folder="" layers="8 16 20 24 32" tiny=()
machine=(--gpu h100 --link nvlink --tp 8 --batch 4)
flags=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --tiny)
            tiny=(--tiny) layers="2 3 4" machine+=(--tp 2)
            shift
            continue
            ;;
        --)
            flags=("${@:2}")
            break
            ;;
        --*) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --layers) layers=$2 ;;
        --gpu | --link | --batch) machine+=("$1" "$2") ;;
        --inference-tp) machine+=(--tp "$2") ;;
        --*) fail "$1: unknown flag: see --help, and put flags of adapt.sh after --" ;;
        *)
            [ -z "$folder" ] || fail "$1: expected one folder, found $folder before it"
            folder=$1
            shift
            continue
            ;;
    esac
    shift 2
done
[ -n "$folder" ] || fail "a folder for the runs is missing: see --help"
for number in $layers; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || fail "--layers: $number: expected numbers of ladder layers, such as \"8 16 32\""
done

mkdir -p "$folder"
for number in $layers; do
    printf '\n%s of the layers become ladder layers\n' "$number"
    bash "$here/adapt.sh" --run "$folder/$number" --ladder-layers "$number" ${tiny[@]+"${tiny[@]}"} \
        ${flags[@]+"${flags[@]}"}
done
prepare_environment data,hf,plot
"$ENVIRONMENT/bin/python" "$here/sweep.py" --runs "$folder" --layers $layers "${machine[@]}"
