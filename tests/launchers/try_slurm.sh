#!/bin/bash
# Try the scripts for Slurm under a real one: munge, slurmctld and three slurmd on this machine, as root, in namespaces
# of their own, which end with it. Needs the packages slurm-wlm and munge; takes about a minute.
#   tests/launchers/try_slurm.sh [PYTHON]
set -euo pipefail
if [ "${INSIDE:-}" != yes ]; then
    exec env INSIDE=yes unshare --mount --net --uts --pid --fork --kill-child --mount-proc "$0" "${1:-$(command -v python3)}"
fi
python=$1 root=$(cd "$(dirname "$0")/../.." && pwd)
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} JAX_PLATFORMS=cpu SLURM_CONF=$tmp/slurm.conf
chmod 755 "$tmp" && cd "$tmp"
ip link set lo up && hostname slurm-try
# The nodes are names of an address of this machine that is not of loopback, so that tasks need the secret.
ip link add nodes type veth peer name nodes-end && ip address add 10.66.0.1/24 dev nodes
ip link set nodes up && ip link set nodes-end up
{ cat /etc/hosts; echo "10.66.0.1 slurm-try n1 n2 n3"; } > hosts && mount --bind hosts /etc/hosts
printf '#!/bin/sh\nexec %s -m dflow "$@"\n' "$python" > dflow && chmod +x dflow
PATH=$tmp:$(dirname "$python"):$PATH

head -c 128 /dev/urandom > munge.key && chmod 600 munge.key
munged --force --key-file="$tmp/munge.key" --socket="$tmp/munge.socket" --pid-file="$tmp/munged.pid" \
    --log-file="$tmp/munged.log" --seed-file="$tmp/munged.seed"
{
    cat << END
ClusterName=try
SlurmctldHost=slurm-try
AuthType=auth/munge
AuthInfo=socket=$tmp/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
StateSaveLocation=$tmp/state
SlurmdSpoolDir=$tmp/spool/%n
SlurmctldPidFile=$tmp/slurmctld.pid
SlurmdPidFile=$tmp/slurmd-%n.pid
SlurmctldLogFile=$tmp/slurmctld.log
SlurmdLogFile=$tmp/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
KillWait=10
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES
END
    for n in 1 2 3; do
        echo "NodeName=n$n NodeHostname=slurm-try NodeAddr=10.66.0.1 Port=1790$n CPUs=2 RealMemory=1000"
    done
} > slurm.conf
mkdir state spool && slurmctld -c
for n in n1 n2 n3; do slurmd -N $n; done

await() { # TEXT FILE: wait up to 90 s until the file has the text
    for _ in $(seq 900); do
        if grep -qs -- "$1" "$2"; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    echo "expected '$1' in $2, got:" && cat "$2" && tail -n 25 slurmctld.log && scontrol show jobs && exit 1
}

cat > train.py << 'END'
import os, time
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    count = dflow.Variable(lambda: jnp.zeros(()), name="count")

@dflow.jit
def step(x):
    count.assign_add(x)
    return {"loss": count.read()}

def batches(number):
    time.sleep(0.02 if os.path.exists("slow") else 0)
    return jnp.float32(1)

for _ in dflow.distributed.Async(cluster).run(step, batches, steps=1500):
    pass
if cluster.elect("report"):
    print("count is", float(count), flush=True)
END

echo "== srun starts the script as often as there are tasks; the first one starts the coordinator"
dflow certs secret cluster.secret > certs.log
export DFLOW_SECRET_FILE=$tmp/cluster.secret
timeout 90 srun --nodes=3 --ntasks-per-node=1 --kill-on-bad-exit=0 "$python" train.py > srun.log 2>&1 ||
    { cat srun.log ./*.log; exit 1; }
await "count is 1500.0" srun.log && grep "count is" srun.log

# With what these nodes have. Jobs begin in the folder that has the scripts.
mkdir -p examples && ln -s "$root/examples/launchers" examples/launchers
sed 's/--gpus-per-node=4//; s/--ntasks-per-node=4/--ntasks-per-node=1/; s/--cpus-per-task=8//' \
    examples/launchers/train.sbatch > het.sbatch
sed '/^#SBATCH hetjob/,/^#SBATCH/d; s/--nodes=1/--nodes=3/; s/--job-name=train/--job-name=even/' het.sbatch > even.sbatch

echo "== train.sbatch, a heterogeneous job: a task server and a worker are killed and started again"
touch slow
sbatch --output=het.log het.sbatch train.py > sbatch.log
await "the first snapshot" het.log
pkill -KILL -f -- "-m dflow task --job ps --index 1"
await "ps:1 runs again; when it has joined" het.log
pkill -KILL -f -o "^$python train.py"
await "worker:[01] ended: killed by SIGKILL; it is started again" het.log
rm slow
await "Steps: 1500 of 1500" het.log
grep -E "dflow: |count is|Steps:" het.log

echo "== train.sbatch with nodes of one kind: the job is requeued"
touch slow
job=$(sbatch --parsable --output=even.log even.sbatch train.py)
await "step [1-9]" even.log
scontrol requeue "$job"
await "the job goes on from snapshot" even.log
rm slow
await "Steps: 1500 of 1500" even.log
grep -E "dflow: |count is|Steps:" even.log

for _ in $(seq 300); do [ -n "$(squeue --noheader)" ] || break; read -rt 0.1 <> <(:) || true; done
[ -z "$(squeue --noheader)" ] && ! pgrep -f "launching.ssh_task" && echo "all that the jobs had started has ended"
