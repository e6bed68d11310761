#!/usr/bin/env bash
# Runs the tests in the project's own environment, which it makes first:
#
#     bash tests/run.sh                     all but the slow tests
#     bash tests/run.sh --slow              all tests
#     bash tests/run.sh tests/unit -k norm  any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh

prepare_environment test

scratch=$(mktemp -d)
unit=""
trap '[ -z "$unit" ] || kill "$unit" 2>/dev/null || true; rm -rf "$scratch"' EXIT

# The variable also tells the processes of this run from all others, whoever their parent is by now.
processes_left() {
    grep -lzs "^TORCH_EXTENSIONS_DIR=$scratch" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

# run_pytest NAME ARGUMENTS...
run_pytest() {
    TORCH_EXTENSIONS_DIR=$scratch/torch_extensions OMP_NUM_THREADS=1 \
        "$ENVIRONMENT/bin/python" -m pytest --basetemp "$scratch/pytest-$1" "${@:2}"
}

status=0
if [ "$*" = "" ] || [ "$*" = --slow ]; then
    # What runs in this process, beside whole commands, which mostly wait; cases of the pool, some of which emulate an
    # interconnect's time, come after both. Job control, as a shell without it starts what is in the background deaf to
    # SIGINT, of which some tests are.
    set -m
    run_pytest unit tests/unit tests/docs "$@" >"$scratch/unit.txt" 2>&1 &
    unit=$!
    set +m
    run_pytest commands --ignore tests/unit --ignore tests/docs --ignore tests/distributed "$@" || status=$?
    wait "$unit" || status=$?
    unit=""
    cat "$scratch/unit.txt"
    run_pytest pool tests/distributed "$@" || status=$?
else
    run_pytest all "$@" || status=$?
fi

for _ in {1..20}; do
    left=$(processes_left)
    [ -n "$left" ] || break
    sleep 0.5
done
for process in $left; do
    echo "error: a test left process $process running: $(tr '\0' ' ' <"/proc/$process/cmdline")" >&2
    kill -KILL "$process" || true
    status=1
done
exit "$status"
