#!/usr/bin/env bash
# LEGACY. One run on v4, v5e, v5p or v6e through queued resources of the Cloud TPU API, which gets
# security updates only and knows no TPU7x: take mig.sh or Kubernetes where you can.
#
#   NAME=mine ZONE=us-central2-b TYPE=v4-32 VERSION=tpu-ubuntu2204-base HOSTS=4 IMAGE=... BUCKET=... \
#   RUN_DIR=/shared/runs/mine launch/gce_tpu/queued.sh [--dry-run] CONFIG [--field value ...]
#
# VERSION: v2-alpha-tpuv5-lite (v5e), v2-alpha-tpuv5 (v5p), v2-alpha-tpuv6e. SPOT=1 or RESERVED=1.
set -euo pipefail
# shellcheck source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
need TYPE "the accelerator type, such as v4-32"
need VERSION "the runtime version, such as tpu-ubuntu2204-base"
# shellcheck source=metadata.sh
source "$(dirname "${BASH_SOURCE[0]}")/metadata.sh"

queued=(gcloud compute tpus queued-resources)
model=()
[[ -z ${SPOT:-} ]] || model=(--spot)
[[ -z ${RESERVED:-} ]] || model=(--reserved)

create() {
    run "${queued[@]}" create "$NAME" --node-id "$NAME" --zone "$ZONE" --accelerator-type "$TYPE" \
        --runtime-version "$VERSION" "${model[@]}" --valid-until-duration "${PATIENCE:-24h}" \
        --metadata "$metadata" --metadata-from-file "${files#startup-script=*,}"
}

remove() {
    run "${queued[@]}" delete "$NAME" --zone "$ZONE" --force --quiet || true
}

state() {
    "${queued[@]}" describe "$NAME" --zone "$ZONE" --format 'value(state.state)'
}

# Run over ssh and not at boot, so that the status is that of the training.
work() {
    run gcloud compute tpus tpu-vm scp "$here/host.sh" "$NAME:/tmp/host.sh" --zone "$ZONE" --worker all
    run gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker all \
        --command "sudo bash /tmp/host.sh"
}

trap 'rm -rf "$written"' EXIT
if ! $dry_run && state >/dev/null 2>&1; then
    fail "NAME is $NAME, and there is a queued resource of that name: take another, or delete it"
fi
trap 'remove; rm -rf "$written"' EXIT
for ((attempt = 0; attempt <= ${MAX_RESTARTS:-10}; attempt++)); do
    create
    if $dry_run; then
        work
        exit
    fi
    until [[ $(state) == ACTIVE ]]; do
        [[ $(state) != FAILED ]] || fail "the request failed: ${queued[*]} describe $NAME"
        sleep 60
    done
    status=0
    work || status=$?
    if ((status != 75)) && [[ $(state) == ACTIVE ]]; then exit "$status"; fi
    remove # preempted or stopped: again
done
fail "stopped $attempt times: that is enough (MAX_RESTARTS)"
