#!/usr/bin/env bash
# Measures on one GPU, in half an hour, what one GPU can show: the checks of tests/gpu.sh, the paper's table, played by one
# GPU as one of eight, training steps and throughput, and a study. For a machine that is rented for an hour:
#
#     bash tests/gpu_day.sh --output FOLDER --wheels WHEELS     repeat it while it exits with 75; each call takes 9 minutes
#     bash tests/gpu_day.sh --output FOLDER --results EARLIER   on another machine, with the files of earlier calls
#     bash tests/gpu_day.sh --output FOLDER --device cpu        a rehearsal with toy sizes
#
# FOLDER gets four files, PART.json, while their parts run, so that a call that is killed loses little. Further flags:
# --minutes N, --only "PARTS", --dry-run (see --help). Paths are relative to the repository.
#
# The machine needs no network. Without WHEELS, packages are those of .venv, or of python3 if there is none. With WHEELS,
# they are installed in .venv-day, and the others are those of python3. Where there is a network, this makes those that a
# machine for PyTorch lacks, for Python 3.12:
#
#     pip download --dest WHEELS --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#         --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 hjson msgpack msgspec pydantic
#     DS_BUILD_OPS=0 pip wheel --wheel-dir WHEELS --no-deps deepspeed==0.19.8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

python=$ENVIRONMENT/bin/python wheels="" words=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels)
            [ $# -gt 1 ] || fail "$1: a value is missing"
            wheels=$2 python=python3
            shift
            ;;
        *) words+=("$1") ;;
    esac
    shift
done

# install WHEELS: makes .venv-day, which finds the packages of python3 after its own.
install() {
    local environment=$REPOSITORY/.venv-day packages site_packages
    compgen -G "$1/*.whl" >/dev/null || fail "--wheels $1: no wheels there: see the head of tests/gpu_day.sh"
    [ ! -e "$ENVIRONMENT" ] || fail "--wheels: $ENVIRONMENT exists, and has all packages: leave --wheels out"
    # A virtual environment made from another one would find the packages of neither.
    packages=$("$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")))')
    if [ "$(cat "$environment/made-of" 2>/dev/null)" != "$packages $(ls "$1")" ]; then
        rm -rf "$environment"
        "$python" -m venv --without-pip "$environment"
        site_packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        printf '%s\n' "$REPOSITORY" "$REPOSITORY/tools" >"$site_packages/day.pth"
        printf "import site; site.addsitedir('%s')\n" $packages >>"$site_packages/day.pth"
        "$python" -m pip --python "$environment/bin/python" install --quiet --no-index --no-deps "$1"/*.whl
        printf '%s\n' "$packages $(ls "$1")" >"$environment/made-of"
    fi
    python=$environment/bin/python
}

[ -x "$python" ] || python=python3
[ -z "$wheels" ] || install "$wheels"
exec "$python" -m tests.gpu.day "${words[@]}"
