#!/usr/bin/env bash
# Compiles a run ahead of time, on this machine, for a pod that is not there, and fails where it does
# not fit: before a chip-hour is spent.
#
#   TOPOLOGY=v5p:4x4x4 launch/aot_check.sh [--dry-run] CONFIG [--field value ...]
set -euo pipefail

python=${PYTHON:-python}
show=false
if [[ ${1:-} == --dry-run ]]; then
    show=true
    shift
fi
if [[ -z ${1:-} || -z ${TOPOLOGY:-} ]]; then
    echo "aot_check.sh: give TOPOLOGY, such as v5p:4x4x4, and a config file" >&2
    exit 2
fi
figures=$(mktemp)
trap 'rm -f "$figures"' EXIT
plan=("$python" -m depthjax plan "$1" --topology "$TOPOLOGY" --json "$figures" "${@:2}")
if $show; then
    printf '%q ' "${plan[@]}"
    echo
    exit
fi
"${plan[@]}"
"$python" - "$figures" "$TOPOLOGY" <<'CHECK'
import json
import sys

entry = json.load(open(sys.argv[1]))["entries"][0]
if not entry["fits"]:
    sys.exit(f"aot_check.sh: the run does not fit on {sys.argv[2]}: see the plan above")
CHECK
