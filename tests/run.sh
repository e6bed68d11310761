#!/usr/bin/env bash
# Runs the tests in the project's own environment, which it creates first:
#
#     bash tests/run.sh                     linter, type checker, and all tests except the slow ones
#     bash tests/run.sh --quick             in a minute: linter, most unit tests, two wirings at TP=2, one training
#     bash tests/run.sh --slow              all tests
#     bash tests/run.sh --ci                as without flags, on a machine of any speed: tests that have not begun after 55
#                                           minutes are reported as skipped, and time limits, which end what hangs, are
#                                           longer
#     bash tests/run.sh tests/unit -k norm  any arguments of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source examples/environment.sh
begin=$(date +%s)

prepare_environment test

scratch=$(mktemp -d)
[ "$*" != --ci ] || set -- --patience 15 --until $((begin + 55 * 60))
lanes=()
# A lane is a process group.
trap 'for lane in "${lanes[@]}"; do kill -- "-$lane" 2>/dev/null || true; done; rm -rf "$scratch"' EXIT

# The variable also distinguishes the processes of this run from all others, whatever their parent is by now.
processes_left() {
    grep -lzs "^TORCH_EXTENSIONS_DIR=$scratch" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

# run_pytest NAME ARGUMENTS...
run_pytest() {
    TORCH_EXTENSIONS_DIR=$scratch/torch_extensions OMP_NUM_THREADS=1 \
        "$ENVIRONMENT/bin/python" -m pytest --basetemp "$scratch/pytest-$1" "${@:2}"
}

check_style() {
    "$ENVIRONMENT/bin/python" -m ruff format --check --quiet && "$ENVIRONMENT/bin/python" -m ruff check --no-fix
}

check_types() {
    "$ENVIRONMENT/bin/python" -m mypy
}

# in_background NAME COMMAND...: starts a lane, whose output appears when it is waited for. Job control, because a shell
# without it starts background processes with SIGINT ignored, and some tests send SIGINT.
in_background() {
    set -m
    "${@:2}" >"$scratch/$1.txt" 2>&1 &
    set +m
    lanes+=($!)
}

# wait_for_lanes: prints what the lanes in the background printed; fails if one of them failed.
wait_for_lanes() {
    local lane failed=0
    for lane in "${lanes[@]}"; do
        wait "$lane" || failed=1
    done
    lanes=()
    cat "$scratch"/*.txt
    rm -f "$scratch"/*.txt
    return "$failed"
}

run_unit_lane() {
    local status=0
    run_pytest unit tests/unit tests/docs "$@" || status=1
    check_style || status=1
    check_types || status=1
    return "$status"
}

# Whole commands, and ranks whose peers are stopped: they wait more than they compute.
WAITING=(tests/distributed/test_{evaluator,program,watch}.py)
run_command_lane() {
    local status=0
    run_pytest chaos tests/chaos "${WAITING[@]}" "$@" || status=1
    run_pytest commands tests/functional "$@" || status=1
    return "$status"
}

# These emulate the time of an interconnect, so nothing else may run.
TIMED=(tests/distributed/test_link.py tests/distributed/test_benchmark.py)

# Two wirings on two ranks, and a training that is stopped and resumed.
QUICK_ON_RANKS=(
    "tests/distributed/test_correctness.py::test_every_wiring_and_layout["{ladder-parallel-tp2-windows-recomputed-whole-one-forward-overlap,experts-ladder-tp2-delta-recomputed-whole-one-forward-overlap}"]"
    tests/distributed/test_file_operations.py
)

status=0
case "$*" in
"" | --slow | --patience*)
    run_pytest timed "${TIMED[@]}" "$@" || status=1
    in_background unit run_unit_lane "$@"
    in_background commands run_command_lane "$@"
    run_pytest pool tests/distributed "${TIMED[@]/#/--ignore=}" "${WAITING[@]/#/--ignore=}" "$@" || status=1
    wait_for_lanes || status=1
    ;;
--quick)
    in_background style check_style
    in_background unit run_pytest unit tests/unit/{checkpoint,convert,generate} -m "not long"
    run_pytest rest "${QUICK_ON_RANKS[@]}" tests/unit/{blueprint,comm,config,data,engine,model,parallel,train} \
        tests/unit/test_{errors,flags,house,vllm_plugin}.py -m "not long" || status=1
    wait_for_lanes || status=1
    ;;
*)
    run_pytest all "$@" || status=1
    ;;
esac

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
