#!/usr/bin/env bash
# Tests the model `megatron_ladder` of lm-eval with the real lm-eval on local tasks, in an environment that it creates
# first:
#
#     bash tests/lm_eval.sh                 all tests
#     bash tests/lm_eval.sh -k hybrid       any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

ENVIRONMENT=$REPOSITORY/.venv-lm-eval
prepare_environment eval,test
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
"$ENVIRONMENT/bin/python" -m pytest tests/lm_eval "$@"
