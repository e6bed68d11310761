#!/usr/bin/env bash
# Builds a wheel, installs it in an empty environment, and prepares data, trains, generates and exports with its programs,
# outside of the repository:
#
#     bash tests/wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
source tests/programs.sh

prepare_environment test
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
stage "building the wheel" "$ENVIRONMENT/bin/python" -m build --no-isolation --outdir "$scratch"

ENVIRONMENT=$scratch/environment
make_virtual_environment "$(find_python)"
install_torch
stage "the wheel" install_packages --constraint constraints.txt "$scratch"/*.whl
(cd / && "$ENVIRONMENT/bin/python" -c \
    'import ladder_lab.cost.machines, megatron_ladder, sys; assert megatron_ladder.__file__.startswith(sys.prefix), megatron_ladder.__file__')
run_programs "$scratch/work"
echo "the wheel works"
