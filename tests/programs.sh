# Prepares data, trains, also an interleaved pipeline, generates and exports with the installed programs. Source it after
# examples/environment.sh:
#
#     source tests/programs.sh
#     run_programs FOLDER         # with the programs of $ENVIRONMENT, in this folder, which must not exist
# shellcheck shell=bash

run_programs() {
    export PATH=$ENVIRONMENT/bin:$PATH OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$1/extensions
    if ! has_gpu; then
        export DS_ACCELERATOR=cpu
    fi
    mkdir "$1"
    cd "$1"
    python - <<'END'
import json, pydoc_data.topics, textwrap
for name, module in ("train", textwrap), ("valid", pydoc_data.topics):
    with open(module.__file__) as source, open(f"{name}.jsonl", "w") as lines:
        print(json.dumps({"text": source.read()}), file=lines)
END
    mkdir data
    megatron-ladder-train-tokenizer --input train.jsonl --vocab-size 512 --model-prefix data/tokenizer
    local part
    for part in train valid; do
        megatron-ladder-preprocess-data --input "$part.jsonl" --output-prefix "data/$part" --append-eod \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model
    done
    local flags=(--residual-mode ladder --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2
        --train-iters 3 --lr 1e-3 --eval-iters 1 --log-interval 1
        --train-data-path data/train_text_document --valid-data-path data/valid_text_document
        --tokenizer-type SentencePieceTokenizer --tokenizer-model data/tokenizer.model)
    megatron-ladder-pretrain "${flags[@]}" --num-layers 2 --save checkpoints
    torchrun --nproc-per-node 2 "$(command -v megatron-ladder-pretrain)" "${flags[@]}" --num-layers 4 \
        --global-batch-size 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1
    megatron-ladder-generate --model checkpoints --tp 2 --prompt "def " --max-new-tokens 8
    megatron-ladder-convert-checkpoint export --load checkpoints --hf exported
    test -s exported/model.safetensors
}
