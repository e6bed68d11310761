# Shared by the examples with several stages: headings, skipping of finished stages, and the launcher. Source it from
# bash in a script that sets
#
#     run         the folder of the run, which contains a folder done/
#     stages      the number of calls of `announce` and `run_once`
#     python      the interpreter, before `launch` is called
#     gpus        the number of usable GPUs; 0 starts CPU processes
#     processes   the number of processes that `launch` starts
# shellcheck shell=bash disable=SC2154

stage_number=0
something_ran=false
trap 'report_failed_stage $?' EXIT

report_failed_stage() {
    if [ "$1" -ne 0 ]; then
        printf '\nStopped in stage %d of %d with exit code %d; run the same command again to continue.\n' \
            "$stage_number" "$stages" "$1" >&2
    fi
}

# announce WHAT: prints the heading of a stage.
announce() {
    stage_number=$((stage_number + 1))
    stage_begin=$SECONDS
    printf '\n[%d/%d] %s\n' "$stage_number" "$stages" "$1"
}

finished() {
    printf '      %s, %d s (%d s since the start)\n' "$1" $((SECONDS - stage_begin)) "$SECONDS"
}

# run_once NAME OUTPUT WHAT COMMAND...: skips a command that has run before with the same words if its output still
# exists and no earlier stage ran again. The record is written last, so a killed command counts as not run.
run_once() {
    local record=$run/done/$1 output=$2 command
    command=$(printf '%q ' "${@:4}")
    announce "$3"
    if ! "$something_ran" && [ -e "$output" ] && [ "$(cat "$record" 2>/dev/null)" = "$command" ]; then
        echo "      already done: $output"
        return
    fi
    something_ran=true
    rm -f "$record"
    "${@:4}"
    printf '%s\n' "$command" >"$record"
    finished "done"
}

# train CHECKPOINTS SCRIPT FLAGS...: launches a training run, and fails if it stopped before its last step: a graceful
# shutdown saves and exits successfully.
train() {
    local newest steps
    launch "${@:2}"
    newest=$(cat "$1/latest")
    steps=$(sed -n 's/^train_iters: //p' "$1/config.yaml")
    if [ "${newest%.*}" != "$(printf 'iter_%07d' "$steps")" ]; then
        echo "training stopped at $newest of $steps steps" >&2
        return 1
    fi
}

# launch SCRIPT FLAGS...: starts the processes with the environment's deepspeed launcher, on a free port so that
# concurrent runs do not collide, and ignores the machine's host file.
launch() {
    local port devices=(--num_gpus "$processes")
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        # With --num_gpus the launcher would ignore CUDA_VISIBLE_DEVICES.
        CUDA_VISIBLE_DEVICES=$(cut -d, -f"1-$processes" <<<"$CUDA_VISIBLE_DEVICES")
        export CUDA_VISIBLE_DEVICES
        devices=()
    fi
    "$python" -m deepspeed.launcher.runner --quiet --hostfile /dev/null --master_port "$port" \
        ${devices[@]+"${devices[@]}"} "$@"
}
