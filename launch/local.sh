#!/usr/bin/env bash
# PROCESSES processes of one run on this machine, each with a GPU of its own, or on the CPU with
# DEVICES simulated devices. (One process drives all the TPU chips of a machine: no script needed.)
#
#   PROCESSES=2 DEVICES=2 RUN_DIR=runs/two launch/local.sh [--dry-run] CONFIG [--field value ...]
#
# SIGTERM and Ctrl-C stop the run at one step, the work saved. When a process dies, the script says
# which, the others end, and the script with the status of the first that failed; the same command
# continues the run.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes=${PROCESSES:-2}
number PROCESSES 1 "the number of processes"
number DEVICES 1 "the simulated devices of each process"
number PORT 1 "a free port for the first process"
((${PORT:-1} < 65536)) || fail "PORT is $PORT: give a free port for the first process, 65535 or less"
check "$@"
port=${PORT:-$("${train[0]}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
shared=(
    "DEPTHJAX_PROCESSES=$processes" "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port"
    "JAX_COMPILATION_CACHE_DIR=$cache" "DEPTHJAX_COMMIT=$commit"
)
if [[ -n ${DEVICES:-} ]]; then
    shared+=("JAX_PLATFORMS=cpu" "JAX_NUM_CPU_DEVICES=$DEVICES")
fi

pids=()
declare -A place # of a process id
for ((i = 0; i < processes; i++)); do
    one=(env "${shared[@]}" "DEPTHJAX_PROCESS_ID=$i" "JAX_LOCAL_DEVICE_IDS=$i" "${train[@]}")
    if $dry_run; then
        run "${one[@]}"
    else
        "${one[@]}" &
        pids+=($!)
        place[$!]=$i
    fi
done
$dry_run && exit

in_words() { # STATUS that a process failed with
    local signal=""
    (($1 <= 128)) || signal=$(kill -l $(($1 - 128)) 2>/dev/null) || true # 255, say, is none
    if (($1 == 2)); then
        echo "did not start, and the others end with it: mend what it says, then run the same command"
    elif [[ -n $signal ]]; then
        echo "was killed (SIG$signal), and the others end with it; the same command continues the run"
    else
        echo "ended with status $1, and the others end with it; the same command continues the run"
    fi
}

trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM
trap 'true' INT # the terminal sends it to the processes as well, which save and end
status=0
while ((${#pids[@]} > 0)); do
    wait -n "${pids[@]}" 2>/dev/null || true
    alive=()
    for pid in "${pids[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then
            alive+=("$pid")
            continue
        fi
        code=0
        wait "$pid" || code=$?
        if ((code != 0 && status == 0)); then
            status=$code
            echo "local.sh: process ${place[$pid]} of $processes $(in_words "$code")" >&2
            # They say so by themselves, within jax's heartbeat of 30 s; then it is enough.
            (sleep 40 && kill -KILL "${pids[@]}") >/dev/null 2>&1 &
            watchdog=$!
        fi
    done
    pids=("${alive[@]}")
done
[[ -z ${watchdog:-} ]] || kill "$watchdog" 2>/dev/null || true
exit "$status"
