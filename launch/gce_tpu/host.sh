#!/usr/bin/env bash
# What each TPU host runs when it starts (mig.sh and queued.sh hand it over as metadata): it mounts
# the bucket, runs the container, and writes its exit status where mig.sh looks for it.
set -euo pipefail

metadata=http://metadata.google.internal/computeMetadata/v1/instance
attribute() { curl -sf -H "Metadata-Flavor: Google" "$metadata/attributes/$1"; }

image=$(attribute depthjax-image)
bucket=$(attribute depthjax-bucket)
mount=$(attribute depthjax-mount)
command=$(attribute depthjax-command)
environment=$(attribute depthjax-environment)

mkdir -p "$mount"
mountpoint -q "$mount" || gcsfuse --implicit-dirs -o allow_other "$bucket" "$mount"
gcloud auth configure-docker "${image%%/*}" --quiet

# A host that is preempted gets 30 s: docker passes SIGTERM on, and the run saves.
trap 'docker stop --time 120 depthjax' TERM
arguments=()
while read -r line; do [[ -z $line ]] || arguments+=(--env "$line"); done <<<"$environment"
docker rm --force depthjax 2>/dev/null || true
docker run --name depthjax --privileged --net host --shm-size 16g -v "$mount:$mount" \
    "${arguments[@]}" "$image" bash -c "exec $command" &
pid=$!
while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done # ends early when a signal comes
status=0
wait "$pid" || status=$? # which bash remembers
curl -sf -X PUT -H "Metadata-Flavor: Google" --data "$status" \
    "$metadata/guest-attributes/depthjax/status" || true
exit "$status"
