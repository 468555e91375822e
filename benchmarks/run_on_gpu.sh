#!/bin/sh
# Checks and times every GPU kernel on this machine (H100 or newer), in a few minutes, into
# gpu_check.txt: sh benchmarks/run_on_gpu.sh
set -eu
cd "$(dirname "$0")/.."
python -c 'import depthjax' 2>/dev/null || python -m pip install -q -e '.[cuda]'
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.9
timeout 480 python benchmarks/gpu_check.py "$@" > gpu_check.txt 2>&1 || status=$?
cat gpu_check.txt
exit "${status:-0}"
