#!/usr/bin/env bash
# PROCESSES processes of one run on this machine, each with a GPU of its own, or on the CPU with
# DEVICES simulated devices. (One process drives all the TPU chips of a machine: no script needed.)
#
#   PROCESSES=2 DEVICES=2 RUN_DIR=runs/two launch/local.sh [--dry-run] CONFIG [--field value ...]
#
# SIGTERM and Ctrl-C stop the run at one step, the work saved. When a process dies, the others end,
# and the script with the status of the first that failed; the same command continues the run.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes=${PROCESSES:-2}
[[ $processes =~ ^[1-9][0-9]*$ ]] || fail "PROCESSES is $processes: give 1 or more"
[[ ${DEVICES:-1} =~ ^[1-9][0-9]*$ ]] || fail "DEVICES is $DEVICES: give 1 or more for each process"
port=${PORT:-$("${train[0]}" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')}
shared=(
    "DEPTHJAX_PROCESSES=$processes" "JAX_COORDINATOR_ADDRESS=127.0.0.1:$port"
    "JAX_COMPILATION_CACHE_DIR=$cache" "DEPTHJAX_COMMIT=$commit"
)
if [[ -n ${DEVICES:-} ]]; then
    shared+=("JAX_PLATFORMS=cpu" "JAX_NUM_CPU_DEVICES=$DEVICES")
fi

pids=()
for ((i = 0; i < processes; i++)); do
    one=(env "${shared[@]}" "DEPTHJAX_PROCESS_ID=$i" "JAX_LOCAL_DEVICE_IDS=$i" "${train[@]}")
    if $dry_run; then
        run "${one[@]}"
    else
        "${one[@]}" &
        pids+=($!)
    fi
done
$dry_run && exit

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
            echo "local.sh: process $pid ended with status $code, and the others with it; the same command continues" >&2
            # They say so by themselves, within jax's heartbeat of 30 s; then it is enough.
            (sleep 40 && kill -KILL "${pids[@]}") >/dev/null 2>&1 &
            watchdog=$!
        fi
    done
    pids=("${alive[@]}")
done
[[ -z ${watchdog:-} ]] || kill "$watchdog" 2>/dev/null || true
exit "$status"
