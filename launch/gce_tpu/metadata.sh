# shellcheck shell=bash disable=SC2034,SC2154
# What mig.sh and queued.sh have in common: what host.sh finds in the metadata of a TPU host.

need NAME "the name of the TPU"
need ZONE "the zone, such as us-east5-b"
need IMAGE "the container image, by digest"
need BUCKET "the name of a bucket with a hierarchical namespace"
need HOSTS "the number of hosts of the slice"
number HOSTS 1 "the number of hosts of the slice"
number MAX_RESTARTS 0 "how often a run that was stopped starts again"
mount=${MOUNT:-/shared}
[[ $RUN_DIR == "$mount"/* ]] || fail "RUN_DIR is $RUN_DIR: give one below $mount, where the bucket is"
check "$@"

train[0]=python # that of the image
here=$launch/gce_tpu
written=$(mktemp -d)
printf '%q ' "${train[@]}" >"$written/command"
cat >"$written/environment" <<END
DEPTHJAX_PROCESSES=$HOSTS
DEPTHJAX_STOP_STATUS=75
DEPTHJAX_COMMIT=$commit
DEPTHJAX_IMAGE=$IMAGE
JAX_COMPILATION_CACHE_DIR=$cache
END
files=startup-script=$here/host.sh
files+=,depthjax-command=$written/command,depthjax-environment=$written/environment
metadata=depthjax-image=$IMAGE,depthjax-bucket=$BUCKET,depthjax-mount=$mount
