#!/usr/bin/env bash
# The same through xpk (github.com/AI-Hypercomputer/xpk), which knows the node pools of its cluster.
#
#   CLUSTER=pods NAME=mine TPU=v5p-128 HOSTS=16 SLICES=2 IMAGE=... STORAGE=shared \
#   RUN_DIR=/shared/runs/mine launch/gke/xpk.sh [--dry-run] CONFIG [--field value ...]
#
# GPUs: GPU=h100-mega-80gb-8 HOSTS=4 in place of TPU and SLICES. STORAGE: volumes attached before
# with `xpk storage`. MANIFEST=file.yaml keeps the JobSet that xpk renders.
set -euo pipefail
# shellcheck source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

need CLUSTER "the name of a cluster that xpk made"
need NAME "the name of the job"
need IMAGE "the container image, by digest"
need HOSTS "the number of hosts of a slice, or of GPU nodes"
slices=${SLICES:-1}
number HOSTS 1 "the number of hosts of a slice, or of GPU nodes"
number SLICES 1 "the number of slices"
number MAX_RESTARTS 0 "how often a job that failed starts again"
train[0]=python # that of the image
command="exec env $(printf '%q ' "${train[@]}")"
if [[ -n ${TPU:-} ]]; then
    size=(--tpu-type "$TPU" --num-slices "$slices")
else
    need GPU "the type of GPU nodes, such as h100-mega-80gb-8, or TPU"
    ((slices == 1)) || fail "SLICES is $slices: GPU nodes have none, give HOSTS alone"
    size=(--device-type "$GPU" --num-nodes "$HOSTS")
    # xpk gives address and port apart, and the number of the node.
    # shellcheck disable=SC2016
    where='DEPTHJAX_PROCESS_ID=$NODE_RANK JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS%%:*}:$JAX_COORDINATOR_PORT'
    command="exec env $where $(printf '%q ' "${train[@]}")"
fi
check "$@"
create=(
    xpk workload create --cluster "$CLUSTER" --workload "$NAME" "${size[@]}"
    --docker-image "$IMAGE" --max-restarts "${MAX_RESTARTS:-10}"
    --termination-grace-period-seconds 300
    --env "DEPTHJAX_PROCESSES=$((HOSTS * slices))" --env DEPTHJAX_STOP_STATUS=75
    --env "DEPTHJAX_COMMIT=$commit" --env "DEPTHJAX_IMAGE=$IMAGE"
    --env "JAX_COMPILATION_CACHE_DIR=$cache" --command "$command"
)
[[ -z ${STORAGE:-} ]] || create+=(--storage "$STORAGE")
[[ -z ${MANIFEST:-} ]] || create+=(--output-manifest-file "$MANIFEST")
run "${create[@]}"
