#!/usr/bin/env bash
# One run on one TPU slice (v5p, v6e, TPU7x) of Compute Engine, as a managed instance group. Deletes
# the group when the run is done; when it is preempted or stopped, makes it anew and goes on.
#
#   NAME=mine PROJECT=mine ZONE=us-east5-b MACHINE=ct6e-standard-4t TOPOLOGY=4x4 HOSTS=4 IMAGE_FAMILY=... \
#   IMAGE=... BUCKET=... RUN_DIR=/shared/runs/mine launch/gce_tpu/mig.sh [--dry-run] CONFIG [--field value ...]
#
# SPOT=1 takes spot capacity. The flags change from year to year; Google's page is
# https://docs.cloud.google.com/compute/docs/tpus/create-tpu-mig-multi-host-slice
set -euo pipefail
# shellcheck source=../common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
need PROJECT "the project"
need MACHINE "the machine type of a host, such as ct6e-standard-4t or ct5p-hightpu-4t"
need TOPOLOGY "the topology of the slice, such as 4x4"
need IMAGE_FAMILY "the TPU image of the hosts, see docs.cloud.google.com/tpu/docs/tpu-os-images"
# shellcheck source=metadata.sh
source "$(dirname "${BASH_SOURCE[0]}")/metadata.sh"

region=${ZONE%-*}
model=()
if [[ -n ${SPOT:-} ]]; then model=(--provisioning-model SPOT --instance-termination-action STOP); fi

create() {
    run gcloud compute resource-policies create workload-policy "$NAME" --region "$region" \
        --type HIGH_THROUGHPUT --accelerator-topology "$TOPOLOGY"
    run gcloud compute instance-templates create "$NAME" --machine-type "$MACHINE" \
        --image-project ubuntu-os-accelerator-images \
        --image-family "$IMAGE_FAMILY" \
        --maintenance-policy TERMINATE "${model[@]}" --scopes cloud-platform \
        --metadata "enable-guest-attributes=TRUE,$metadata" --metadata-from-file "$files"
    run gcloud compute instance-groups managed create "$NAME" --zone "$ZONE" --size "$HOSTS" \
        --template "$NAME" --default-action-on-vm-failure do-nothing \
        --workload-policy "projects/$PROJECT/regions/$region/resourcePolicies/$NAME"
}

remove() {
    run gcloud compute instance-groups managed delete "$NAME" --zone "$ZONE" --quiet || true
    run gcloud compute instance-templates delete "$NAME" --quiet || true
    run gcloud compute resource-policies delete "$NAME" --region "$region" --quiet || true
}

outcome() { # the status that the first host wrote, "lost" where a host is gone
    local hosts
    hosts=$(gcloud compute instance-groups managed list-instances "$NAME" --zone "$ZONE" \
        --format 'value(instance.basename(),instanceStatus)')
    if grep -qE 'STOPP|TERMINATED|SUSPEND' <<<"$hosts"; then
        echo lost
        return
    fi
    gcloud compute instances get-guest-attributes "$(head -n 1 <<<"$hosts" | cut -f 1)" \
        --zone "$ZONE" --query-path depthjax/status --format 'value(value)' 2>/dev/null || true
}

trap 'rm -rf "$written"' EXIT
if ! $dry_run && gcloud compute instance-groups managed describe "$NAME" --zone "$ZONE" >/dev/null 2>&1; then
    fail "NAME is $NAME, and there is a group of that name: take another, or delete the group"
fi
trap 'remove; rm -rf "$written"' EXIT
for ((attempt = 0; attempt <= ${MAX_RESTARTS:-10}; attempt++)); do
    create
    $dry_run && exit
    result=
    while [[ -z $result ]]; do
        sleep 60
        result=$(outcome)
    done
    echo "mig.sh: the run ended with $result"
    [[ $result == lost || $result == 75 ]] || exit "$result"
    remove
done
fail "stopped $attempt times: that is enough (MAX_RESTARTS)"
