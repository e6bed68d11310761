# Shared by the examples for several hosts: the command of the deepspeed launcher. Source it from bash, in the
# repository's folder, in a script that sets
#
#     hosts           names or addresses that all hosts can resolve; rank 0 runs on the first
#     gpus_per_host   number of GPUs per host
#     master_port     a port of the first host
#     node_rank       this host's number if every host is started separately; empty starts all from here over ssh
#
#     require_launcher      exits if a program is missing, and reads .deepspeed_env
#     build_launcher        sets the array `launcher`, and writes `hostfile`, which is removed at exit
# shellcheck shell=bash disable=SC2154

# fail LINE...: prints what is wrong and how to fix it, and exits with the code for invalid input.
fail() {
    printf 'error: %s\n' "$@" >&2
    exit 2
}

[ ! -d .venv/bin ] || export PATH=$PWD/.venv/bin:$PATH

require_launcher() {
    local file line
    command -v deepspeed >/dev/null ||
        fail "no deepspeed on the PATH: install the package on this host, or activate its environment"
    if [ -z "$node_rank" ]; then
        command -v pdsh >/dev/null || fail "no pdsh on the PATH: install it, or start this script on every host with --node-rank"
    fi
    # .deepspeed_env, here or in the home directory, holds variables for all ranks, one NAME=VALUE per line. The launcher
    # passes them to hosts that it reaches over ssh, and fails on any other line. Without ssh, this script reads them.
    for file in "$HOME/${DS_ENV_FILE:-.deepspeed_env}" "${DS_ENV_FILE:-.deepspeed_env}"; do
        [ -f "$file" ] || continue
        while IFS= read -r line || [ -n "$line" ]; do
            [[ $line =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || fail "$file: found '$line', expected NAME=VALUE: remove that line"
            [ -z "$node_rank" ] || export "${line?}"
        done <"$file"
    done
}

build_launcher() {
    local names
    read -ra names <<<"$hosts"
    hostfile=$(mktemp)
    trap 'rm -f "$hostfile"' EXIT
    printf "%s slots=$gpus_per_host\n" "${names[@]}" >"$hostfile"
    launcher=(deepspeed --hostfile "$hostfile" --master_addr "${names[0]}" --master_port "$master_port")
    if [ -n "$node_rank" ]; then
        [[ $node_rank =~ ^[0-9]+$ && $node_rank -lt ${#names[@]} ]] ||
            fail "--node-rank $node_rank: expected 0 to $((${#names[@]} - 1)), a number for each of: ${names[*]}"
        launcher+=(--no_ssh --node_rank "$node_rank")
    fi
}
