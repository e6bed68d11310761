#!/usr/bin/env bash
# Tests the plugin on CPUs, in an environment with vLLM that it creates first:
#
#     bash vllm_plugin/test.sh                all tests but the slow ones
#     bash vllm_plugin/test.sh --quick        in four minutes: tokens and order of every wiring, as on GPUs
#     bash vllm_plugin/test.sh --slow         all tests
#     bash vllm_plugin/test.sh -k ladder      any arguments of pytest
#
# Exits with 77 if this machine cannot run vLLM's CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

command -v g++ >/dev/null || {
    echo "skipped: torch.compile needs g++"
    exit 77
}
# The tests run on CPUs even if there are GPUs, which the generator would use.
export CUDA_VISIBLE_DEVICES=""
prepare_environment test
bash vllm_plugin/install.sh
vllm=$REPOSITORY/vllm_plugin/.venv

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# vLLM and torch reuse what earlier code compiled.
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_MODULES_CACHE=$scratch/modules \
    VLLM_CACHE_ROOT=$scratch/vllm TORCHINDUCTOR_CACHE_DIR=$scratch/inductor
stage "models and reference tokens" "$ENVIRONMENT/bin/python" -m vllm_plugin.tests.models "$scratch/models"
"$vllm/bin/python" -m pytest vllm_plugin/tests --models "$scratch/models" --basetemp "$scratch/pytest" "$@"
