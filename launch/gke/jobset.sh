#!/usr/bin/env bash
# Renders gke/jobset.yaml, or with DEVICE=gpu gke/jobset-gpu.yaml, and hands it to the cluster.
#
#   NAME=mine IMAGE=region-docker.pkg.dev/project/repo/depthjax@sha256:... CLAIM=shared \
#   ACCELERATOR=tpu-v5p-slice TOPOLOGY=4x4x4 HOSTS=16 SLICES=2 RUN_DIR=/shared/runs/mine \
#       launch/gke/jobset.sh [--dry-run] CONFIG [--field value ...]
#
# CLAIM is a volume claim that all pods may write to (Filestore, or Cloud Storage with a hierarchical
# namespace), mounted at MOUNT (/shared), below which RUN_DIR lies. --dry-run prints the manifest.
set -euo pipefail
# shellcheck source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

device=${DEVICE:-tpu}
[[ $device == tpu || $device == gpu ]] || fail "DEVICE is $device: give tpu or gpu"
need NAME "the name of the job"
need IMAGE "the container image, by digest"
need CLAIM "the name of a volume claim that all pods can write to"
need ACCELERATOR "the node label's value, such as tpu-v5p-slice or nvidia-h100-80gb"
need HOSTS "the number of hosts of a slice, or of GPU nodes"
template=$launch/gke/jobset-gpu.yaml
chips=${CHIPS:-8}
slices=${SLICES:-1}
if [[ $device == tpu ]]; then
    need TOPOLOGY "the topology of a slice, such as 4x4x4"
    template=$launch/gke/jobset.yaml
    chips=${CHIPS:-4}
fi
mount=${MOUNT:-/shared}
[[ $RUN_DIR == "$mount"/* ]] || fail "RUN_DIR is $RUN_DIR: give one below $mount, where the shared volume is"
number HOSTS 1 "the number of hosts of a slice, or of GPU nodes"
number SLICES 1 "the number of slices"
number CHIPS 1 "the number of chips of a host"
number MAX_RESTARTS 0 "how often a job that failed starts again"
[[ $device == tpu || $slices == 1 ]] || fail "SLICES is $slices: GPU nodes have none, give HOSTS alone"
check "$@"

train[0]=python # that of the image
quoted=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${train[@]}")
manifest=$(
    COMMAND=$quoted PROCESSES=$((HOSTS * slices)) SLICES=$slices CHIPS=$chips \
        QUEUE=${QUEUE:-default} MAX_RESTARTS=${MAX_RESTARTS:-10} MOUNT=$mount COMMIT=$commit \
        CACHE=$cache SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-default} TOPOLOGY=${TOPOLOGY:-} \
        NAME=$NAME IMAGE=$IMAGE CLAIM=$CLAIM ACCELERATOR=$ACCELERATOR HOSTS=$HOSTS \
        python3 -c '
import os, string, sys
print(string.Template(open(sys.argv[1]).read()).substitute(os.environ), end="")' "$template"
)
if $dry_run; then
    echo "$manifest"
else
    kubectl apply -f - <<<"$manifest"
fi
