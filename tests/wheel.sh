#!/usr/bin/env bash
# Builds a wheel, installs it in an empty environment, and prepares data, trains, generates and exports with its programs,
# outside of the repository:
#
#     bash tests/wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

prepare_environment test
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
stage "building the wheel" "$ENVIRONMENT/bin/python" -m build --no-isolation --outdir "$scratch"

ENVIRONMENT=$scratch/environment
make_virtual_environment "$(find_python)"
install_torch
stage "the wheel" install_packages --constraint constraints.txt "$scratch"/*.whl
export PATH=$ENVIRONMENT/bin:$PATH OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$scratch/extensions
if ! has_gpu; then
    export DS_ACCELERATOR=cpu
fi

mkdir "$scratch/work"
cd "$scratch/work"
python -c 'import megatron_ladder, sys; assert megatron_ladder.__file__.startswith(sys.prefix), megatron_ladder.__file__'
python - <<'END'
import json, pydoc_data.topics, textwrap
for name, module in ("train", textwrap), ("valid", pydoc_data.topics):
    with open(module.__file__) as source, open(f"{name}.jsonl", "w") as lines:
        print(json.dumps({"text": source.read()}), file=lines)
END
mkdir data
megatron-ladder-train-tokenizer --input train.jsonl --vocab-size 512 --model-prefix data/tokenizer
for part in train valid; do
    megatron-ladder-preprocess-data --input "$part.jsonl" --output-prefix "data/$part" --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model
done
megatron-ladder-pretrain --residual-mode ladder --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 \
    --micro-batch-size 2 --train-iters 3 --lr 1e-3 --eval-iters 1 \
    --train-data-path data/train_text_document --valid-data-path data/valid_text_document \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model --save checkpoints
megatron-ladder-generate --model checkpoints --tp 2 --prompt "def " --max-new-tokens 8
megatron-ladder-convert-checkpoint export --load checkpoints --hf exported
test -s exported/model.safetensors
echo "the wheel works"
