#!/usr/bin/env bash
# The paper's adaptation: the upper half of a Llama becomes ladder, a short training heals it, and what comes out is a
# Hugging Face directory. Edit the two places below, or give flags:
#
#     bash examples/adapt_llama/adapt.sh --tiny                a tiny Llama made here: minutes on two CPU cores
#     bash examples/adapt_llama/adapt.sh --source DIR --conversations FILE --held-out FILE
#     bash examples/adapt_llama/adapt.sh ... --dry-run         says what would be run, and checks the source's headers
#     bash examples/adapt_llama/adapt.sh ... -- FLAGS          further flags go to pretrain_ladder.py and win
#
# Further flags: --run FOLDER, --tokens N, --chat-keys "KEYS", --gpus N, --tp N, --lm-eval-tasks "TASKS", and --python
# PATH, an interpreter that has what is needed, instead of this script's own environment (.venv). --conversations may be
# given several times. Run again, it does only what is not done yet: training goes on from its last checkpoint.
# examples/adapt_llama/README.md says what to expect.
set -euo pipefail

# EDIT 1: the model, as downloaded from Hugging Face, and conversations: any input of tools/preprocess_data.py --chat.
# The held-out ones are JSON lines, and must not be among the others.
source_model=/models/Llama-3.1-8B-Instruct
conversations=(/data/conversations.jsonl)
held_out=/data/held_out.jsonl
chat_keys="messages"
run=adapted

# EDIT 2: this machine, with a layout of tools/plan.py --model llama-8b --gpus 8 --global-batch-size 32.
processes=8
layout=(--tensor-model-parallel-size 4 --zero-stage 1 --micro-batch-size 2 --sequence-parallel)
tp=4
workers=16

# The paper (arXiv 2501.06589): 16 of 32 layers, 3 billion tokens, learning rate 5e-6 after 200 steps of warm-up.
ladder_layers=16
tokens=3000000000
lr=5e-6
warmup=200
# The name of a published checkpoint, which seems to be the authors', says a batch of 32 and 4k tokens.
global_batch=32
seq_length=4096
# Ours: the rest of the recipe, and how often to save and to evaluate.
recipe=(--min-lr 0 --lr-decay-style cosine --weight-decay 0 --clip-grad 1 --adam-beta1 0.9 --adam-beta2 0.95
    --reset-position-ids --reset-attention-mask)
intervals=(--save-interval 500 --keep-last-n-checkpoints 2 --eval-interval 500 --eval-iters 20 --log-interval 10)

tiny=false
dry_run=false
own_python=""
given_tokens=""
given_conversations=()
lm_eval_tasks=()
training_flags=()
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
source "$repository/examples/environment.sh"

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --tiny | --dry-run)
            [ "$1" = --tiny ] && tiny=true || dry_run=true
            shift
            continue
            ;;
        --)
            training_flags=("${@:2}")
            break
            ;;
        --*) [ $# -gt 1 ] || fail "$1: a value is missing" ;;&
        --source) source_model=$2 ;;
        --conversations) given_conversations+=("$2") ;;
        --held-out) held_out=$2 ;;
        --chat-keys) chat_keys=$2 ;;
        --run) run=$2 ;;
        --tokens) given_tokens=$2 ;;
        --gpus) processes=$2 ;;
        --tp) tp=$2 layout+=(--tensor-model-parallel-size "$2") ;;
        --lm-eval-tasks) read -ra lm_eval_tasks <<<"$2" ;;
        --python) own_python=$2 ;;
        *) fail "$1: unknown: --help lists the flags; those of pretrain_ladder.py come after --" ;;
    esac
    shift 2
done
[ ${#given_conversations[@]} -eq 0 ] || conversations=("${given_conversations[@]}")

gpus=$(gpu_count)
if "$tiny"; then
    chat_keys=messages workers=1
    processes=2 tp=2
    if [ "$gpus" -eq 1 ]; then
        processes=1 tp=1
    fi
    layout=(--tensor-model-parallel-size "$tp" --zero-stage 1 --micro-batch-size 4)
    ladder_layers=4 tokens=$((120 * 16 * 128)) lr=1e-3 warmup=10 global_batch=16 seq_length=128
    intervals=(--save-interval 40 --keep-last-n-checkpoints 2 --eval-interval 40 --eval-iters 4 --log-interval 10)
fi
read -ra keys <<<"$chat_keys"
tokens=${given_tokens:-$tokens}

mistakes=()
need() {
    [ -e "$2" ] || mistakes+=("$1 $2: there is no such $3: $4")
}
if ! "$tiny"; then
    need --source "$source_model/config.json" file "give the folder of a Hugging Face model, or --tiny"
    "$dry_run" || need --held-out "$held_out" file "give JSON lines of conversations, as $(basename "$0") --help says"
    if ! "$dry_run" && [ "$gpus" -lt "$processes" ]; then
        mistakes+=("--gpus $processes: this machine has $gpus that may be used: give another number, or --tiny")
    fi
fi
if "$tiny" && "$dry_run"; then
    mistakes+=("--tiny --dry-run: there is nothing to look at before the tiny model is made: leave one of them out")
fi
[ ${#mistakes[@]} -eq 0 ] || fail "${mistakes[@]}"

"$dry_run" || mkdir -p "$run/done"
absolute() { (cd "$(dirname "$1")" && printf '%s/%s\n' "$(pwd -P)" "$(basename "$1")"); }
run=$(absolute "$run")
if "$tiny"; then
    source_model=$run/tiny/source conversations=("$run/tiny/train.jsonl") held_out=$run/tiny/held_out.jsonl
else
    source_model=$(absolute "$source_model")
    "$dry_run" || held_out=$(absolute "$held_out")
fi
for index in "${!conversations[@]}"; do
    [ ! -e "${conversations[$index]}" ] || conversations[index]=$(absolute "${conversations[$index]}")
done
cd "$repository"

# shellcheck disable=SC2034  # stages.sh reads it
stages=$("$tiny" && echo 7 || echo 6)
source examples/stages.sh

if "$dry_run"; then
    run_once() { printf '%s:\n    ' "$3" && printf '%q ' "${@:4}" && echo; }
fi

# with_python SCRIPT FLAGS...: in a stage's record, so that it holds in another environment too.
with_python() {
    "$python" "$@"
}

# has MODULE: whether the environment can import it.
has() {
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

preprocess() {
    local name=$1
    shift
    "$python" tools/preprocess_data.py --chat --chat-keys "${keys[@]}" --output-prefix "$run/data/$name" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$source_model" --workers "$workers" --input "$@"
}

tokenize() {
    mkdir -p "$run/data"
    preprocess valid "$held_out"
    preprocess train "$@"
}

# heal FLAGS...: begins with the imported weights, or goes on from the newest checkpoint of those.
heal() {
    local begin=(--load "$run/imported" --finetune) newest
    if [ -e "$run/checkpoints/latest" ]; then
        cmp -s "$run/done/import" "$run/done/began_with" || fail \
            "$run/checkpoints: began with another import than $run/imported: move them away, or give another --run"
        begin=(--load "$run/checkpoints")
    fi
    cp "$run/done/import" "$run/done/began_with"
    launch "$@" "${begin[@]}"
    # A training that is asked to stop saves and ends well, before its last step.
    newest=$(cat "$run/checkpoints/latest")
    if [ "${newest%.*}" != "$(printf 'iter_%07d' "$steps")" ]; then
        echo "healing was stopped at $newest of $steps steps" >&2
        return 1
    fi
}

export_hf() {
    "$python" tools/convert_checkpoint.py export --load "$1" --hf "$2" --dtype bf16 --verify --overwrite
}

evaluate() {
    local unhealed=$run/imported
    if has lm_eval; then
        # lm-eval opens Hugging Face directories alone.
        export_hf "$run/imported" "$run/unhealed"
        unhealed=$run/unhealed
    fi
    "$python" examples/adapt_llama/evaluate.py --output "$run/evaluation" --held-out "$held_out" \
        --chat-keys "${keys[@]}" --tokenizer "$source_model" --seq-length "$seq_length" --tp "$tp" \
        --models source="$source_model" unhealed="$unhealed" healed="$run/healed" "$@"
}

if [ -n "$own_python" ]; then
    announce "Python environment: $own_python"
    python=$(command -v "$own_python") || fail "--python $own_python: there is no such program"
    if ! has deepspeed || ! has transformers; then
        fail "--python $own_python: lacks deepspeed or transformers: install '.[data,hf]', or leave --python out"
    fi
else
    announce "Python environment"
    prepare_environment data,hf
    python=$ENVIRONMENT/bin/python
fi
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}

if "$tiny"; then
    run_once tiny "$held_out" "Source: a tiny Llama, a tokenizer and conversations" \
        with_python examples/adapt_llama/tiny_llama.py --output "$run/tiny"
fi

importing=(--hf "$source_model" --save "$run/imported" --ladder-layers "$ladder_layers"
    --tensor-model-parallel-size "$tp" --verify --overwrite)
run_once import "$run/imported/latest" "Import: the upper $ladder_layers layers become ladder" \
    with_python tools/convert_checkpoint.py import "${importing[@]}"
if "$dry_run"; then
    "$python" tools/convert_checkpoint.py import "${importing[@]}" --dry-run
fi

run_once tokens "$run/data/train_${keys[0]}_document.idx" "Conversations: tokens, and which the assistant says" \
    tokenize "${conversations[@]}"

model_flags=$("$python" examples/adapt_llama/model_flags.py --hf "$source_model")
mapfile -t model_flags <<<"$model_flags"
steps=$(((tokens + global_batch * seq_length - 1) / (global_batch * seq_length)))
run_once heal "$run/checkpoints/latest" "Healing: $steps steps of $global_batch x $seq_length tokens" \
    heal pretrain_ladder.py \
    "${model_flags[@]}" --residual-mode ladder --ladder-layers "$ladder_layers" \
    "${layout[@]}" --bf16 --global-batch-size "$global_batch" --seq-length "$seq_length" \
    --train-iters "$steps" --lr "$lr" --lr-warmup-iters "$warmup" "${recipe[@]}" --loss-on assistant \
    --train-data-path "$run/data/train_${keys[0]}_document" --valid-data-path "$run/data/valid_${keys[0]}_document" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$source_model" \
    --save "$run/checkpoints" "${intervals[@]}" --tensorboard-dir "$run/tensorboard" \
    ${training_flags[@]+"${training_flags[@]}"}

run_once export "$run/healed/config.json" "Export: a Hugging Face directory" \
    export_hf "$run/checkpoints" "$run/healed"

evaluation=()
[ ${#lm_eval_tasks[@]} -eq 0 ] || evaluation=(--lm-eval-tasks "${lm_eval_tasks[@]}")
# Whether lm-eval is there belongs to the command: when it has been installed since, it is run.
has lm_eval || evaluation+=(--no-lm-eval)
run_once evaluation "$run/evaluation/table.md" "Evaluation: before, right after the import, and healed" \
    evaluate ${evaluation[@]+"${evaluation[@]}"}
"$dry_run" && exit 0

printf '\nDone in %d s.\n\n' "$SECONDS"
cat "$run/evaluation/table.md"
cat <<END

    model         $run/healed
    checkpoints   $run/checkpoints
    TensorBoard   $run/tensorboard

Next:
    $python tools/generate.py --model $run/healed --tp $tp --chat --interactive
END
