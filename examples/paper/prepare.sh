#!/usr/bin/env bash
# Once before the paper's runs: the first held-out documents of settings.sh, as tokens. Where hf:// is read, on a host
# with a network. Run again, it begins anew; all runs must have the same file.
#
#     bash examples/paper/prepare.sh
#     bash examples/paper/prepare.sh --tiny FOLDER      of the toy: its training texts too
set -euo pipefail
if [ "${1:-}" = --tiny ] && [ $# -eq 2 ]; then
    mkdir -p "$2"
    folder=$(cd "$2" && pwd -P)
elif [ $# -gt 0 ]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]] && exit 0
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ ! -d .venv/bin ] || export PATH=$PWD/.venv/bin:$PATH
source examples/paper/settings.sh
if [ -n "${folder:-}" ]; then
    source examples/paper/tiny.sh
    python3 examples/paper/take_documents.py --input docs/*.md --documents 8 --output "${training_texts[0]}"
fi
python3 examples/paper/take_documents.py --input "${held_out_texts[@]}" --documents "$held_out_documents" \
    --output "$held_out.jsonl"
python3 tools/preprocess_data.py --input "$held_out.jsonl" --output-prefix "$held_out" --append-eod "${tokenizer[@]}"
