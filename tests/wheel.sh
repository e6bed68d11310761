#!/usr/bin/env bash
# Builds a source distribution and a wheel from it, installs each in an environment without the repository, and prepares
# data, trains, generates and exports with its programs:
#
#     bash tests/wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
source tests/programs.sh

prepare_environment test
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
stage "building the distributions" "$ENVIRONMENT/bin/python" -m build --no-isolation --outdir "$scratch"

ENVIRONMENT=$scratch/environment
make_virtual_environment "$(find_python)"
install_torch
stage "the wheel" install_packages --constraint constraints.txt "$scratch"/*.whl
(cd / && "$ENVIRONMENT/bin/python" -c \
    'import ladder_lab.cost.machines, megatron_ladder, sys; assert megatron_ladder.__file__.startswith(sys.prefix), megatron_ladder.__file__')
run_programs "$scratch/wheel"
echo "the wheel works"

stage "the source distribution" install_packages --no-deps --force-reinstall "$scratch"/*.tar.gz
run_programs "$scratch/source"
mkdir "$scratch/unpacked"
tar --extract --strip-components 1 --directory "$scratch/unpacked" --file "$scratch"/*.tar.gz
stage "the programs of the unpacked source" "$ENVIRONMENT/bin/python" "$scratch/unpacked/pretrain_ladder.py" --help
for program in "$scratch"/unpacked/tools/*.py; do
    stage "$(basename "$program")" "$ENVIRONMENT/bin/python" "$program" --help
done
echo "the source distribution works"
