#!/usr/bin/env bash
# Trains one model on several hosts with the deepspeed launcher. Edit the two places below, then:
#
#     bash examples/multi_node.sh                  on the first host: starts all hosts over ssh with pdsh
#     bash examples/multi_node.sh --node-rank N    on every host, N = 0 on the first, 1 on the second: without ssh
#
# Every host needs this repository and its environment (.venv, or the one on the PATH) under the same path. Further flags
# go to pretrain_ladder.py and override those below. --hosts "A B", --gpus-per-host N and --master-port N replace the
# first edit, as in examples/multi_node.sbatch. The exit code is that of tools/report_run.py --status: 0 finished, 2 invalid
# input, 3 bad numbers, 1 worth another attempt. docs/multi_node.md explains what to do if a run does not start.
set -euo pipefail

# EDIT 1: names or addresses that all hosts can resolve, rank 0 on the first, and the number of GPUs per host.
hosts="node-1 node-2"
gpus_per_host=8

# EDIT 2: the data, readable under the same path on every host, and a checkpoint directory on a shared file system.
data=/shared/corpus_text_document
tokenizer=/shared/tokenizer.model
checkpoints=/shared/checkpoints

master_port=29500
node_rank=""
training_flags=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        --hosts) hosts=$2 ;;
        --gpus-per-host) gpus_per_host=$2 ;;
        --master-port) master_port=$2 ;;
        --node-rank) node_rank=$2 ;;
        *)
            training_flags=("$@")
            break
            ;;
    esac
    shift 2
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/hosts.sh
require_launcher
build_launcher

for ((place = 0; place + 1 < ${#training_flags[@]}; place++)); do
    [ "${training_flags[place]}" != --save ] || checkpoints=${training_flags[place + 1]}
done

"${launcher[@]}" pretrain_ladder.py \
    --tensor-model-parallel-size "$gpus_per_host" --zero-stage 1 --bf16 \
    --residual-mode ladder --num-layers 40 --hidden-size 1536 --num-attention-heads 24 \
    --seq-length 2048 --micro-batch-size 4 --global-batch-size 512 \
    --train-iters 25000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000 \
    --data-path "$data" --split 99,1,0 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$tokenizer" \
    --save "$checkpoints" --load "$checkpoints" --save-interval 500 \
    ${training_flags[@]+"${training_flags[@]}"} || echo "the launcher ended with exit code $?" >&2

# Launchers lose the exit codes of their ranks; the record of the run has them.
python3 tools/report_run.py --status "$checkpoints"
