# What examples of several stages share: headings, stages that are skipped when they are done, and the launcher.
# To be sourced by bash, by a script that sets
#
#     run         the folder of the run, which has a folder done/
#     stages      how many times `announce` and `run_once` are called
#     python      the interpreter, before `launch`
#     gpus        GPUs that may be used; 0 means CPU processes
#     processes   how many processes `launch` starts
# shellcheck shell=bash disable=SC2154

stage_number=0
something_ran=false
trap 'say_where_it_stopped $?' EXIT

say_where_it_stopped() {
    if [ "$1" -ne 0 ]; then
        printf '\nStopped in stage %d of %d with exit code %d; the same command goes on from there.\n' \
            "$stage_number" "$stages" "$1" >&2
    fi
}

# announce WHAT: the heading of a stage.
announce() {
    stage_number=$((stage_number + 1))
    stage_begin=$SECONDS
    printf '\n[%d/%d] %s\n' "$stage_number" "$stages" "$1"
}

finished() {
    printf '      %s, %d s (%d s since the start)\n' "$1" $((SECONDS - stage_begin)) "$SECONDS"
}

# run_once NAME OUTPUT WHAT COMMAND...: skips a command that has run before, word for word, when its output is still
# there and nothing before it ran anew. The record is written last, so a killed command counts as not run.
run_once() {
    local record=$run/done/$1 output=$2 command
    command=$(printf '%q ' "${@:4}")
    announce "$3"
    if ! "$something_ran" && [ -e "$output" ] && [ "$(cat "$record" 2>/dev/null)" = "$command" ]; then
        echo "      done before: $output"
        return
    fi
    something_ran=true
    rm -f "$record"
    "${@:4}"
    printf '%s\n' "$command" >"$record"
    finished "done"
}

# launch SCRIPT FLAGS...: one process for each GPU, or CPU process, by the deepspeed launcher of the environment.
# Its port is a free one, so that runs beside each other do not meet, and a machine's hostfile is left aside.
launch() {
    local port devices=(--num_gpus "$processes")
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        # With --num_gpus the launcher would forget which GPUs it was given.
        CUDA_VISIBLE_DEVICES=$(cut -d, -f"1-$processes" <<<"$CUDA_VISIBLE_DEVICES")
        export CUDA_VISIBLE_DEVICES
        devices=()
    fi
    "$python" -m deepspeed.launcher.runner --quiet --hostfile /dev/null --master_port "$port" \
        ${devices[@]+"${devices[@]}"} "$@"
}
