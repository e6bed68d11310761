# Creates and updates the project's own Python environment, .venv in the repository. Source it from bash:
#
#     source examples/environment.sh
#     prepare_environment plot          # or: test, or several extras of setup.py as "plot,data"
#     "$ENVIRONMENT/bin/python" ...
#
# The record of what is installed is written last, so an interrupted installation is detected, and an unchanged
# environment costs nothing. uv installs if it is on the PATH, because it takes a fraction of pip's time; else pip. Their
# settings (index, mirror, cache, proxies) are the user's and stay untouched.
# shellcheck shell=bash

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
ENVIRONMENT=$REPOSITORY/.venv
CONSTRAINTS=$REPOSITORY/constraints.txt

# fail LINE...: prints what is wrong and how to fix it, and exits with the code for invalid input.
fail() {
    printf 'error: %s\n' "$@" >&2
    exit 2
}

# prepare_environment EXTRAS: installs the package with these extras, in the versions of $CONSTRAINTS.
prepare_environment() {
    local extras python stamp wanted lock=""
    extras=$(tr , '\n' <<<"$1" | sort | paste -sd ,)
    python=$(find_python)
    stamp=$ENVIRONMENT/prepared-${extras//,/-}
    wanted=$(wanted_environment "$extras" "$python")
    if is_prepared "$stamp" "$wanted"; then
        echo "environment: .venv is ready"
        return
    fi
    echo "environment: preparing .venv for $("$python" -V) with [$extras]"
    # A second script in the same repository waits here until the first has finished.
    if command -v flock >/dev/null; then
        exec {lock}>"$REPOSITORY/.venv.lock"
        flock --nonblock "$lock" || {
            echo "environment: another script is preparing it, waiting"
            flock "$lock"
        }
    fi
    if ! is_prepared "$stamp" "$wanted"; then
        make_virtual_environment "$python"
        touch "$ENVIRONMENT/incomplete"
        install_torch
        install_package "$extras"
        printf '%s\n' "$wanted" >"$stamp"
        rm -f "$ENVIRONMENT/incomplete"
    fi
    if [ -n "$lock" ]; then
        exec {lock}>&-
    fi
}

# Prints the first Python that is new enough, python3 before the numbered ones.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            # In a virtual environment, use the Python that created it, which outlives it.
            "$candidate" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
            return
        fi
    done
    if command -v python3 >/dev/null; then
        fail "python3 is $(python3 -V 2>&1), but 3.11 or newer is needed: install it; python3.11 to python3.14 on the PATH are found too"
    fi
    fail "no python3 on the PATH: install Python 3.11 or newer"
}

# Prints what an environment is made from.
wanted_environment() {
    local extras=$1 python=$2
    echo "extras $extras"
    "$python" -c 'import sys; print("python", sys.version)'
    cat "$CONSTRAINTS" "$REPOSITORY"/{setup.py,pyproject.toml} | cksum
}

is_prepared() {
    local stamp=$1 wanted=$2
    [ ! -e "$ENVIRONMENT/incomplete" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] &&
        was_made_here && "$ENVIRONMENT/bin/python" -c '' 2>/dev/null && ! lacks_cuda
}

# Scripts of a virtual environment contain its absolute path, so a copied or moved one is unusable.
was_made_here() {
    [ -f "$ENVIRONMENT/made-at" ] && [ "$(cat "$ENVIRONMENT/made-at")" = "$ENVIRONMENT" ]
}

has_gpu() {
    # Not a pipe: grep -q ends at the first match, and pipefail would report the SIGPIPE of nvidia-smi.
    command -v nvidia-smi >/dev/null && grep -q '^GPU ' <<<"$(nvidia-smi --list-gpus 2>/dev/null)"
}

# Prints the number of GPUs that a program started here may use.
gpu_count() {
    if ! has_gpu; then
        echo 0
    elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        nvidia-smi --list-gpus | grep -c '^GPU '
    fi
}

# Prints the build of torch that this machine needs: cpu, cu126 if the driver is too old for CUDA 13, or nothing for the
# default of the package index, which contains CUDA 13.
torch_build() {
    if has_gpu; then
        ! is_driver_below 580 || echo cu126
    elif [ "$(uname)" != Darwin ]; then
        echo cpu
    fi
}

driver_version() {
    nvidia-smi --query-gpu=driver_version --format=csv,noheader | sed -n 1p
}

# Prints the highest compute capability of the GPUs. Drivers that cannot tell it know no GPU above 8.9.
highest_capability() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader | grep -x '[0-9]*\.[0-9]*' | sort -V | tail -n 1 || true
}

# True if a GPU is a Blackwell or a later one, for which the cu126 build has no kernels.
has_blackwell() {
    local capability
    capability=$(highest_capability)
    [ "${capability%%.*}" -ge 10 ] 2>/dev/null
}

is_driver_below() {
    local driver
    driver=$(driver_version)
    [ "${driver%%.*}" -lt "$1" ] 2>/dev/null
}

# True if there is a GPU that the installed torch cannot use, as after moving from a login node to a GPU node.
lacks_cuda() {
    has_gpu || return 1
    case $(compgen -G "$ENVIRONMENT/lib/python3*/site-packages/torch-[0-9]*.dist-info") in
    *+cu126.*) has_blackwell ;;
    "" | *+cu12*) return 1 ;;
    *+cpu.*) return 0 ;;
    *) [ -n "$(torch_build)" ] ;;
    esac
}

make_virtual_environment() {
    local python=$1 version
    if [ -e "$ENVIRONMENT" ] && [ ! -f "$ENVIRONMENT/made-at" ]; then
        fail "$ENVIRONMENT exists, but this script did not create it: move it away and run again"
    fi
    if [ -e "$ENVIRONMENT/incomplete" ]; then
        echo "environment: .venv is incomplete: creating it again"
    elif ! was_made_here || ! same_python "$python" "$ENVIRONMENT/bin/python"; then
        [ ! -e "$ENVIRONMENT" ] || echo "environment: .venv belongs to another directory or Python: creating it again"
    else
        return 0
    fi
    rm -rf "$ENVIRONMENT"
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        fail "$python cannot create virtual environments: install its venv module (Debian, Ubuntu: apt install $version-venv)"
    fi
    mkdir -p "$ENVIRONMENT"
    touch "$ENVIRONMENT/incomplete"
    printf '%s\n' "$ENVIRONMENT" >"$ENVIRONMENT/made-at"
    stage "virtual environment" "$python" -m venv "$ENVIRONMENT"
}

same_python() {
    local ask='import sys; print(sys.version)'
    [ "$("$1" -c "$ask" 2>/dev/null)" = "$("$2" -c "$ask" 2>/dev/null)" ]
}

# torch is installed first and alone: as a dependency, pip would choose the newest build with all of CUDA.
install_torch() {
    local version build gpus
    version=$(sed -n 's/^torch==//p' "$CONSTRAINTS")
    if lacks_cuda; then
        stage "removing the build of torch that cannot use these GPUs" pip uninstall --yes torch
    fi
    if has_version torch "$version"; then
        return
    fi
    build=$(torch_build)
    if [ "$build" = cu126 ] && is_driver_below 525; then
        fail "driver $(driver_version) of this machine's GPUs is too old for torch $version: update it to 525 or newer"
    elif [ "$build" = cu126 ] && has_blackwell; then
        fail "driver $(driver_version) is too old for a GPU of capability $(highest_capability): update it to 580 or newer"
    elif [ "$build" = cpu ] && command -v nvidia-smi >/dev/null && ! gpus=$(nvidia-smi --list-gpus 2>&1); then
        echo "environment: note: torch will use the CPU, because nvidia-smi failed: $(head -n 1 <<<"$gpus")"
    fi
    if [ -z "$build" ]; then
        stage "torch $version, default build (up to several GB)" install_packages "torch==$version"
    elif attempt "torch $version, $build build" install_packages "torch==$version+$build"; then
        return
    elif attempt "uv, which can locate $build builds" pip install --constraint "$CONSTRAINTS" uv &&
        attempt "torch $version, $build build, with uv" "$ENVIRONMENT/bin/uv" pip install --no-deps \
            --python "$ENVIRONMENT/bin/python" --torch-backend "$build" "torch==$version"; then
        return
    elif [ "$build" = cpu ]; then
        echo "environment: note: no CPU build of torch is available here; the default build includes CUDA (several GB)"
        stage "torch $version" install_packages "torch==$version"
    else
        fail "no $build build of torch $version is available here, and driver $(driver_version) is too old for the default build: update it to 580 or newer"
    fi
}

install_package() {
    # Otherwise DeepSpeed would honour a stray DS_BUILD_OPS=1 and require a compiler.
    DS_BUILD_OPS=0 stage "deepspeed, megatron_ladder and their dependencies" \
        install_packages --constraint "$CONSTRAINTS" --editable "${REPOSITORY}[$1]"
    repair_scripts
}

# The kernel ends the interpreter's path in the first line of a script at a blank, so the shell starts it instead. pip
# and uv do this for entry points, but not for scripts, such as deepspeed.
repair_scripts() {
    local script first rest
    [[ $ENVIRONMENT == *[[:space:]]* ]] || return 0
    for script in "$ENVIRONMENT"/bin/*; do
        read -r first <"$script" || true
        if [[ $first == "#!$ENVIRONMENT/"* ]]; then
            rest=$(tail -n +2 "$script")
            printf '%s\n' '#!/bin/sh' "'''exec' \"${first#??}\" \"\$0\" \"\$@\"" "' '''" "$rest" >"$script"
        fi
    done
}

# install_packages ARGUMENTS...: uv does not read pip's settings, so pip has the last word.
install_packages() {
    command -v uv >/dev/null && uv pip install --compile-bytecode --python "$ENVIRONMENT/bin/python" "$@" ||
        pip install "$@"
}

pip() {
    "$ENVIRONMENT/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

# has_version PACKAGE VERSION: whether it is installed, in any build (the +cpu of 2.13.0+cpu).
has_version() {
    "$ENVIRONMENT/bin/python" -c '
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    sys.exit(version(sys.argv[1]).partition("+")[0] != sys.argv[2])
except PackageNotFoundError:
    sys.exit(1)' "$1" "$2"
}

# stage WHAT COMMAND...: runs the command quietly and prints how long it took; ends the script if it fails.
stage() {
    if ! attempt "$@"; then
        echo "error: $1 failed; the end of $ENVIRONMENT/install.log:" >&2
        tail -n 25 "$ENVIRONMENT/install.log" | grep -v '^WARNING' | sed 's/^/    /' >&2
        exit 1
    fi
}

# attempt WHAT COMMAND...: as stage, but returns the command's status.
attempt() {
    local what=$1 begin=$SECONDS ticker="" status=0
    shift
    printf 'environment: %s ...' "$what"
    if [ -t 1 ]; then
        (while sleep 1 && kill -0 $$; do printf '\renvironment: %s ... %d s' "$what" $((SECONDS - begin)); done) &
        ticker=$!
    fi
    "$@" >"$ENVIRONMENT/install.log" 2>&1 </dev/null || status=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null
        wait "$ticker" 2>/dev/null || true
        printf '\renvironment: %s ...' "$what"
    fi
    if [ "$status" -eq 0 ]; then
        printf ' %d s\n' $((SECONDS - begin))
    else
        printf ' failed (%d s)\n' $((SECONDS - begin))
    fi
    return "$status"
}
