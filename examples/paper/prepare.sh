#!/usr/bin/env bash
# Run this once before the paper's runs: tokenizes the first held-out documents of settings.sh. hf:// inputs need a host
# with network access. Running it again starts from scratch; all runs must use the same file.
#
#     bash examples/paper/prepare.sh
#     bash examples/paper/prepare.sh --tiny FOLDER      for the toy, including its training texts
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
