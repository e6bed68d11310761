#!/usr/bin/env bash
# Runs transformers' own tests of every model on the exported code, in all wirings. They are part of its source
# distribution, which is downloaded first:
#
#     bash tests/modeling_common.sh                 all tests
#     bash tests/modeling_common.sh -k hybrid       any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

prepare_environment test
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
version=$("$ENVIRONMENT/bin/python" -c 'import transformers; print(transformers.__version__)')
"$ENVIRONMENT/bin/python" -m pip download --quiet --no-deps --no-binary transformers --dest "$scratch" "transformers==$version"
"$ENVIRONMENT/bin/python" -m pip install --quiet --no-deps --target "$scratch" parameterized accelerate
tests=$scratch/transformers_tests
mkdir -p "$tests/generation" "$tests/exporters"
tar --extract --to-stdout --file "$scratch/transformers-$version.tar.gz" \
    "transformers-$version/tests/test_modeling_common.py" >"$tests/test_modeling_common.py"
# The distribution lacks these two, and the tests here need only their names.
echo 'class GenerationTesterMixin: pass' >"$tests/generation/test_utils.py"
echo 'class ExportTesterMixin: pass' >"$tests/exporters/test_export.py"
touch "$tests/__init__.py" "$tests/generation/__init__.py" "$tests/exporters/__init__.py"
export PYTHONPATH=$scratch CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# Their marks are not those of this project.
"$ENVIRONMENT/bin/python" -m pytest -c /dev/null --rootdir . tests/modeling_common "$@"
