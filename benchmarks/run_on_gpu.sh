#!/bin/sh
# Checks and times every GPU kernel on this machine (H100 or newer) in a few minutes:
#     sh benchmarks/run_on_gpu.sh | tee gpu_check.txt
set -eu
cd "$(dirname "$0")/.."
python -c 'import depthjax' 2>/dev/null || python -m pip install -q -e '.[cuda]'
exec timeout 480 python benchmarks/gpu_check.py "$@"
