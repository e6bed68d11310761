#!/usr/bin/env bash
# Trains a ladder model from scratch on this machine and samples text from it:
#
#     bash examples/quickstart.sh                                       writes to quickstart/
#     bash examples/quickstart.sh RUN_FOLDER                            writes to another folder
#     bash examples/quickstart.sh RUN_FOLDER --residual-mode standard   further flags go to pretrain_ladder.py,
#     bash examples/quickstart.sh RUN_FOLDER --optimizer muon           such as these
#
# Creates its own Python environment (.venv), and runs two processes on a CPU or on two GPUs, or one on a single GPU.
# Run again, it skips finished stages, and an interrupted training run resumes from its last checkpoint.
set -euo pipefail

if [[ ${1:-} == -* ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    [[ $1 == -h || $1 == --help ]] && exit 0
    exit 2
fi
run=${1:-$(dirname "${BASH_SOURCE[0]}")/../quickstart}
mkdir -p "$run/done"
run=$(cd "$run" && pwd -P)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
training_flags=("${@:2}")

stages=5
source examples/stages.sh

sample() {
    "$python" tools/generate.py --model "$run/checkpoint" --tp "$tp" --max-new-tokens 80 --temperature 0.7 \
        --top-k 40 --seed 1 --prompt "def" --prompt "class" | tee "$run/sample.txt"
}

announce "Python environment"
prepare_environment plot
python=$ENVIRONMENT/bin/python
finished "ready"

gpus=$(gpu_count)
processes=2 tp=2 precision=() device="the CPU"
if [ "$gpus" -gt 0 ]; then
    precision=(--bf16)
    if [ "$gpus" -eq 1 ]; then
        processes=1 tp=1
    fi
    device="$processes of $gpus GPUs"
else
    export DS_ACCELERATOR=cpu
fi

run_once corpus "$run/data/valid_text_document.idx" \
    "Corpus: a tokenizer and tokens from the sources of Python's standard library" \
    "$python" examples/prepare_corpus.py --output-dir "$run/data" --vocab-size 2048 --max-megabytes 4

run_once training "$run/checkpoint/latest" \
    "Training: a ladder model on $device, $processes processes, tensor parallel $tp" \
    train "$run/checkpoint" pretrain_ladder.py \
    --tensor-model-parallel-size "$tp" --zero-stage 1 ${precision[@]+"${precision[@]}"} \
    --residual-mode ladder --num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-key-value-heads 2 \
    --seq-length 128 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 8 \
    --train-iters 240 --lr 4e-3 --min-lr 4e-4 --lr-warmup-iters 20 --lr-decay-style cosine \
    --train-data-path "$run/data/train_text_document" --valid-data-path "$run/data/valid_text_document" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/data/tokenizer.model" \
    --save "$run/checkpoint" --load "$run/checkpoint" --save-interval 120 \
    --eval-interval 60 --eval-iters 5 --log-interval 10 --tensorboard-dir "$run/tensorboard" \
    ${training_flags[@]+"${training_flags[@]}"}

run_once plot "$run/loss.png" \
    "Plot: the loss over iterations" \
    "$python" tools/report_run.py "$run/checkpoint" --output "$run/loss.png"

run_once sample "$run/sample.txt" \
    "Sampling: text from the model, tensor parallel $tp" \
    sample

shown=${run#"$PWD"/}
quoted=$(printf '%q' "$shown")
cat <<END

Done in $SECONDS s. A model of 4 million parameters has read 0.25 million tokens: it has learned what Python looks like,
not what it means. Guessing would cost ln 2048 = 7.6 nats per token; "valid lm loss" above is what the model needs on
files that it has not read. In $PWD:
    loss curve    $shown/loss.png
    TensorBoard   $shown/tensorboard
    checkpoint    $shown/checkpoint
    samples       $shown/sample.txt

Next, from there:
    .venv/bin/tensorboard --logdir $quoted/tensorboard
    .venv/bin/python tools/generate.py --model $quoted/checkpoint --tp $tp --prompt "import"
    bash examples/quickstart.sh $quoted-standard --residual-mode standard
END
