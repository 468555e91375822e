#!/usr/bin/env bash
# A SLURM cluster of this one machine, for the tests of launch/slurm: two partitions, of which `high`
# preempts `low`, whose jobs get 60 s of grace and return to the queue. As root, from Debian's
# packages:
#
#   apt-get install -y slurm-wlm munge && tests/launch/slurm_cluster.sh start DIR
#   export SLURM_CONF=DIR/slurm.conf
#   tests/launch/slurm_cluster.sh stop DIR
set -euo pipefail

action=${1:?start or stop} dir=$(realpath -m "${2:?a directory for configuration, state and logs}")

if [[ $action == stop ]]; then
    for name in slurmctld slurmd munged; do
        if [[ -f $dir/$name.pid ]]; then kill "$(cat "$dir/$name.pid")" || true; fi
    done
    exit
fi

mkdir -p "$dir"/{state,spool,munge}
chmod 755 "$dir"
host=$(hostname -s)
cat >"$dir/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${SLURM_TEST_PORT:-16817}
SlurmdPort=$((${SLURM_TEST_PORT:-16817} + 1))
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
MinJobAge=300
NodeName=$host NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes=$host Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=$host PriorityTier=2 PreemptMode=OFF State=UP
CONF
export SLURM_CONF=$dir/slurm.conf
dd if=/dev/urandom of="$dir/munge/key" bs=1 count=1024 status=none
chmod 600 "$dir/munge/key"
munged --force --key-file="$dir/munge/key" --socket="$dir/munge/socket" \
    --pid-file="$dir/munged.pid" --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
slurmctld
slurmd -N "$host"
for _ in $(seq 60); do
    if sinfo -h -o %T 2>/dev/null | grep -q idle; then
        exit
    fi
    sleep 0.5
done
echo "slurm_cluster.sh: the node did not come up, see $dir/*.log" >&2
exit 1
