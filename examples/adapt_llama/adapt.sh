#!/usr/bin/env bash
# Adapts a Llama: converts the half of its layers that costs least to ladder layers, heals the model with a short training
# run, and exports a Hugging Face directory. Edit the two places below, or pass flags:
#
#     bash examples/adapt_llama/adapt.sh --tiny                a generated tiny Llama: minutes on two CPU cores
#     bash examples/adapt_llama/adapt.sh --source DIR --conversations FILE --held-out FILE
#     bash examples/adapt_llama/adapt.sh ... --dry-run         prints the commands, and checks the headers of the source
#     bash examples/adapt_llama/adapt.sh ... -- FLAGS          further flags override those for pretrain_ladder.py
#
# Other flags: --ladder-layers best:16 (measured first), 16 or 20 (the upper ones, as in the paper), a list such as 4-31,
# or best:16@FILE with a file of tools/convert_checkpoint.py sensitivity; --lanes N (own partials, a multiple of --tp),
# --run FOLDER, --tokens N, --chat-keys "KEYS", --gpus N, --tp N, --lm-eval-tasks "TASKS" (with a metric:
# arc_challenge:acc_norm), and --python PATH to use an interpreter with the required packages instead of this script's
# environment (.venv). --conversations may be repeated.
# Run again, the script skips finished stages, and training resumes from its last checkpoint.
# examples/adapt_llama/README.md describes the results.
set -euo pipefail

# EDIT 1: the model, as downloaded from Hugging Face, and conversations: any input of tools/preprocess_data.py --chat.
# The held-out conversations are JSON lines, and must not occur in the training data.
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

# The paper (arXiv 2501.06589): 3 billion tokens, learning rate 5e-6 after 200 steps of warm-up. It converts the upper 16
# of 32 layers, and we the 16 cheapest.
ladder_layers=best:16
tokens=3000000000
lr=5e-6
warmup=200
# From the name of a published checkpoint, apparently the authors': a batch of 32 and 4k tokens.
global_batch=32
seq_length=4096
# Chosen by us: the rest of the recipe, and the intervals of saving and evaluation.
measured_tokens=65536
recipe=(--min-lr 0 --lr-decay-style cosine --weight-decay 0 --clip-grad 1 --adam-beta1 0.9 --adam-beta2 0.95)
# Conversations that share a row do not see each other, in training and in the measurements before it.
documents=(--reset-position-ids --reset-attention-mask)
intervals=(--save-interval 500 --keep-last-n-checkpoints 2 --eval-interval 500 --eval-iters 20 --log-interval 10)

tiny=false
dry_run=false
own_python=""
lanes=""
given_layers=""
given_tokens=""
given_conversations=()
set_by_tiny=()
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
        --source | --conversations | --held-out | --chat-keys | --gpus | --tp) set_by_tiny+=("$1") ;;&
        --source) source_model=$2 ;;
        --conversations) given_conversations+=("$2") ;;
        --held-out) held_out=$2 ;;
        --chat-keys) chat_keys=$2 ;;
        --ladder-layers) given_layers=$2 ;;
        --lanes) lanes=$2 ;;
        --run) run=$2 ;;
        --tokens) given_tokens=$2 ;;
        --gpus) processes=$2 ;;
        --tp) tp=$2 layout+=(--tensor-model-parallel-size "$2") ;;
        --lm-eval-tasks) read -ra lm_eval_tasks <<<"$2" ;;
        --python) own_python=$2 ;;
        *) fail "$1: unknown flag; see --help, and put flags of pretrain_ladder.py after --" ;;
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
    measured_tokens=16384
    ladder_layers=best:3 tokens=$((120 * 16 * 128)) lr=1e-3 warmup=10 global_batch=16 seq_length=128
    intervals=(--save-interval 40 --keep-last-n-checkpoints 2 --eval-interval 40 --eval-iters 4 --log-interval 10)
fi
# Own partials exclude sequence parallelism.
[ -z "$lanes" ] || read -ra layout <<<"${layout[*]/--sequence-parallel/}"
read -ra keys <<<"$chat_keys"
ladder_layers=${given_layers:-$ladder_layers}
tokens=${given_tokens:-$tokens}

errors=()
# require FLAG FILE FIX: records an error if the file does not exist.
require() {
    [ -e "$2" ] || errors+=("$1 $2: file not found; $3")
}
if ! "$tiny"; then
    require --source "$source_model/config.json" "pass the directory of a Hugging Face model, or --tiny"
    "$dry_run" || require --held-out "$held_out" "pass conversations as JSON lines, see $(basename "$0") --help"
    if ! "$dry_run" && [ "$gpus" -lt "$processes" ]; then
        errors+=("--gpus $processes: this machine has $gpus usable GPUs; pass another number, or --tiny")
    fi
else
    for name in ${set_by_tiny[@]+"${set_by_tiny[@]}"}; do
        errors+=("$name: --tiny sets it; remove one of the two")
    done
fi
if "$tiny" && "$dry_run"; then
    errors+=("--tiny --dry-run: a dry run needs an existing model, and --tiny creates one; remove one of these flags")
fi
[ ${#errors[@]} -eq 0 ] || fail "${errors[@]}"

"$dry_run" || mkdir -p "$run/done"
beginning=$(pwd -P)
absolute() { [[ $1 == /* ]] && echo "$1" || echo "$beginning/$1"; }
run=$(absolute "$run")
[[ $own_python != */* ]] || own_python=$(absolute "$own_python")
unhealed=$run/imported
if "$tiny"; then
    source_model=$run/tiny/source conversations=("$run/tiny/train.jsonl") held_out=$run/tiny/held_out.jsonl
else
    source_model=$(absolute "$source_model")
    held_out=$(absolute "$held_out")
fi
if [[ $ladder_layers = best:*@* && -e ${ladder_layers#*@} ]]; then
    ladder_layers=${ladder_layers%%@*}@$(absolute "${ladder_layers#*@}")
fi
for index in "${!conversations[@]}"; do
    case ${conversations[$index]} in
        hf://* | -) ;;
        *) conversations[index]=$(absolute "${conversations[$index]}") ;;
    esac
done
cd "$repository"

# shellcheck disable=SC2034  # stages.sh reads it
stages=$("$tiny" && echo 7 || echo 6)
measured_layers=""
if [[ $ladder_layers = best:* && $ladder_layers != *@* ]]; then
    measured_layers=${ladder_layers#best:} ladder_layers+=@$run/sensitivity.json stages=$((stages + 1))
fi
if [ -n "$lanes" ]; then
    unhealed=$run/arranged stages=$((stages + 1))
fi
source examples/stages.sh

if "$dry_run"; then
    run_once() { printf '%s:\n    ' "$3" && printf '%q ' "${@:4}" && echo; }
fi

# with_python SCRIPT FLAGS...: keeps the interpreter's path out of a stage's record, so that the record remains valid in
# another environment.
with_python() {
    "$python" "$@"
}

# has MODULE: succeeds if the environment can import the module.
has() {
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"
}

preprocess() {
    local name=$1
    shift
    "$python" tools/preprocess_data.py --chat --chat-keys "${keys[@]}" --output-prefix "$run/data/$name" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$source_model" --workers "$workers" --input "$@"
}

# tokenize TOKENIZER KEYS HELD_OUT INPUT...: its words name everything on which the stage depends.
tokenize() {
    mkdir -p "$run/data"
    preprocess valid "$3"
    preprocess train "${@:4}"
}

# origin: what the unhealed weights depend on.
origin() {
    cat "$run/done/import"
    [ -z "$lanes" ] || cat "$run/done/arrange"
    [ -z "$measured_layers" ] || cat "$run/sensitivity.json"
}

# heal FLAGS...: starts from the unhealed weights, or resumes from the newest checkpoint of a run that did.
heal() {
    local begin=(--load "$unhealed" --finetune)
    if [ -e "$run/checkpoints/latest" ]; then
        origin | cmp -s - "$run/done/began_with" || fail \
            "$run/checkpoints: this run started from other weights than $unhealed; move it, or choose another --run"
        begin=(--load "$run/checkpoints")
    fi
    origin >"$run/done/began_with"
    train "$run/checkpoints" "$@" "${begin[@]}"
}

export_hf() {
    "$python" tools/convert_checkpoint.py export --load "$1" --hf "$2" --dtype bf16 --verify --overwrite
}

# evaluate SOURCE KEYS HELD_OUT FLAGS...: its words name everything on which the stage depends.
evaluate() {
    local compared=$unhealed
    if has lm_eval; then
        # lm-eval opens only Hugging Face directories.
        export_hf "$unhealed" "$run/unhealed"
        compared=$run/unhealed
    fi
    "$python" examples/adapt_llama/evaluate.py --output "$run/evaluation" --held-out "$held_out" \
        --chat-keys "${keys[@]}" --tokenizer "$source_model" --seq-length "$seq_length" --tp "$tp" \
        --models source="$source_model" unhealed="$compared" healed="$run/healed" "${@:4}"
}

extras=data,hf,plot${lanes:+,lab}
if [ -n "$own_python" ]; then
    announce "Python environment: $own_python"
    python=$(command -v "$own_python") || fail "--python $own_python: program not found; pass the path of a Python interpreter"
    for package in deepspeed transformers matplotlib ${lanes:+scipy}; do
        has "$package" || fail "--python $own_python: $package is missing; install '.[$extras]', or omit --python"
    done
else
    announce "Python environment"
    prepare_environment "$extras"
    python=$ENVIRONMENT/bin/python
fi
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu

if "$tiny"; then
    run_once tiny "$held_out" "Source: a tiny Llama, a tokenizer and conversations" \
        with_python examples/adapt_llama/tiny_llama.py --output "$run/tiny"
fi

importing=(--hf "$source_model" --save "$run/imported" --verify --overwrite)
# Errors in the source and the layers are found before hours of work. Layers that are not measured yet are the upper ones.
check_import() {
    "$python" tools/convert_checkpoint.py import "${importing[@]}" --ladder-layers "${measured_layers:-$ladder_layers}" \
        ${lanes:+--lanes "$lanes"} --dry-run
}
if "$dry_run"; then check_import; else check_import >/dev/null; fi

run_once tokens "$run/data/train_${keys[0]}_document.idx" "Conversations: tokens, and a mask of the assistant's tokens" \
    tokenize "$source_model" "$chat_keys" "$held_out" "${conversations[@]}"

if [ -n "$measured_layers" ]; then
    run_once sensitivity "$run/sensitivity.json" "Sensitivity: the $measured_layers layers that cost least" \
        with_python tools/convert_checkpoint.py sensitivity --load "$source_model" --tp "$tp" \
        --data "$run/data/train_${keys[0]}_document" --seq-length "$((seq_length < 2048 ? seq_length : 2048))" \
        --tokens "$measured_tokens" "${documents[@]}" --greedy-layers "$measured_layers" --output "$run/sensitivity.json"
fi

run_once import "$run/imported/latest" "Import: --ladder-layers $ladder_layers" \
    with_python tools/convert_checkpoint.py import "${importing[@]}" --ladder-layers "$ladder_layers"

if [ -n "$lanes" ]; then
    run_once arrange "$run/arranged/latest" "Arrangement: heads and neurons that affect each other share one of $lanes lanes" \
        with_python tools/convert_checkpoint.py arrange --load "$run/imported" --save "$run/arranged" --overwrite \
        --lanes "$lanes" --data "$run/data/train_${keys[0]}_document" \
        --seq-length "$((seq_length < 2048 ? seq_length : 2048))" --tokens "$measured_tokens" "${documents[@]}"
fi

steps=$(((tokens + global_batch * seq_length - 1) / (global_batch * seq_length)))
run_once heal "$run/checkpoints/latest" "Healing: $steps steps of $global_batch x $seq_length tokens" \
    heal pretrain_ladder.py \
    "${layout[@]}" --bf16 --global-batch-size "$global_batch" --seq-length "$seq_length" \
    --train-iters "$steps" --lr "$lr" --lr-warmup-iters "$warmup" "${recipe[@]}" "${documents[@]}" --loss-on assistant \
    --train-data-path "$run/data/train_${keys[0]}_document" --valid-data-path "$run/data/valid_${keys[0]}_document" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$source_model" \
    --save "$run/checkpoints" "${intervals[@]}" --tensorboard-dir "$run/tensorboard" \
    ${training_flags[@]+"${training_flags[@]}"}

run_once export "$run/healed/config.json" "Export: a Hugging Face directory" \
    export_hf "$run/checkpoints" "$run/healed"

evaluation=()
[ ${#lm_eval_tasks[@]} -eq 0 ] || evaluation=(--lm-eval-tasks "${lm_eval_tasks[@]}")
# The recorded command depends on whether lm-eval is installed, so the stage runs again after its installation.
has lm_eval || evaluation+=(--no-lm-eval)
run_once evaluation "$run/evaluation/table.md" "Evaluation: the source, the imported and the healed model" \
    evaluate "$source_model" "$chat_keys" "$held_out" ${evaluation[@]+"${evaluation[@]}"}
"$dry_run" && exit 0

printf '\nDone in %d s.\n\n' "$SECONDS"
if "$tiny" && [ -z "$lanes$given_layers$given_tokens" ]; then
    awk -F ' *[|] *' '
        BEGIN { split("model,expected,---,---,source,below 1.02,unhealed,above 1.05,healed,below 1.02", words, ",")
                for (i = 1; i < 11; i += 2) expected[words[i]] = words[i + 1] }
        { print $0 (/^[|]/ ? " " expected[$2] " |" : "") }' "$run/evaluation/table.md"
else
    cat "$run/evaluation/table.md"
fi
cat <<END

    model         $run/healed
    checkpoints   $run/checkpoints
    TensorBoard   $run/tensorboard

Next:
    $python tools/generate.py --model $run/healed --tp $tp --chat --interactive
END
