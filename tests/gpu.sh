#!/usr/bin/env bash
# Checks the CUDA path on the GPUs of this machine and prints one table; docs/gpu.md describes the checks:
#
#     bash tests/gpu.sh                       all checks for which there are enough GPUs, in about 15 minutes, or 40 with 4
#     bash tests/gpu.sh --only gradients      those whose titles match a regular expression
#     bash tests/gpu.sh --output gpu.md       also writes the table, with the errors of failed checks
#     bash tests/gpu.sh --device cpu          the same checks on a CPU: 2 and 4 gloo processes stand for 2 and 8 GPUs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

prepare_environment test
exec "$ENVIRONMENT/bin/python" -m tests.gpu --gpus "$(gpu_count)" "$@"
