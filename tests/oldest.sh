#!/usr/bin/env bash
# Tests the oldest torch that setup.py allows, in an environment that it creates first (6 GB, if the package index has no
# CPU build): unit tests, every wiring on several ranks, pipelines, dry runs, and the programs outside of the repository:
#
#     bash tests/oldest.sh
#
# Exits with 77 if the package index does not have this version for this Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
source tests/programs.sh

version=$(sed -n 's/^ *"torch>=\([0-9.]*\),.*/\1.0/p' setup.py)
ENVIRONMENT=$REPOSITORY/.venv-oldest
if [ ! -e "$ENVIRONMENT" ] && ! grep -qwF "$version" <<<"$("$(find_python)" -m pip index versions torch 2>/dev/null)"; then
    echo "skipped: the package index has no torch $version for this Python"
    exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
CONSTRAINTS=$scratch/constraints.txt
sed "s/^torch==.*/torch==$version/" constraints.txt >"$CONSTRAINTS"
prepare_environment test
TORCH_EXTENSIONS_DIR=$scratch/extensions OMP_NUM_THREADS=1 "$ENVIRONMENT/bin/python" -m pytest \
    --basetemp "$scratch/pytest" tests/unit tests/distributed/test_{correctness,captured,dry_run,pipeline}.py -m "not long"
run_programs "$scratch/work"
echo "torch $version works"
