#!/bin/bash
# Try `dflow launch --on ssh` with two hosts as network namespaces of this machine, each with its sshd, as root. Tasks of
# each role are killed, one host is cut off and comes back, and the count of steps must be exact. Needs the package
# openssh-server; takes about two minutes.
#   tests/launchers/try_ssh.sh [PYTHON]
set -euo pipefail
if [ "${INSIDE:-}" != yes ]; then
    exec env INSIDE=yes unshare --mount --net --pid --fork --kill-child --mount-proc "$0" "${1:-$(command -v python3)}"
fi
python=$1 root=$(cd "$(dirname "$0")/../.." && pwd)
tmp=$(mktemp -d) && trap 'rm -rf "$tmp"' EXIT
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} JAX_PLATFORMS=cpu
mkdir -p /run/sshd /run/netns && mount -t tmpfs none /run/netns && cd "$tmp"

ssh-keygen -q -t ed25519 -N '' -f host && ssh-keygen -q -t ed25519 -N '' -f user
printf '#!/bin/sh\nexport PYTHONPATH=%s JAX_PLATFORMS=cpu\nexec %s "$@"\n' "$PYTHONPATH" "$python" > python
chmod +x python
ip link set lo up && ip link add bridge type bridge && ip address add 10.66.0.1/24 dev bridge && ip link set bridge up
for n in 2 3; do
    ip netns add "h$n" && ip link add "to-h$n" type veth peer name eth0 netns "h$n"
    ip link set "to-h$n" master bridge up && ip -n "h$n" link set lo up
    ip -n "h$n" address add "10.66.0.$n/24" dev eth0 && ip -n "h$n" link set eth0 up
    ip netns exec "h$n" "$(PATH=$PATH:/usr/sbin command -v sshd)" -f /dev/null -E "sshd-$n.log" -o Port=2222 \
        -o HostKey="$tmp/host" -o AuthorizedKeysFile="$tmp/user.pub" -o StrictModes=no -o PidFile=none -o UsePAM=no
    echo "[10.66.0.$n]:2222 $(cat host.pub)" >> known
    echo "10.66.0.$n slots=$n port=2222" >> hosts
done

await() { # TEXT: wait up to 90 s until the launch has printed it
    for _ in $(seq 900); do
        if grep -qs -- "$1" launch.log; then return; fi
        read -rt 0.1 <> <(:) || true
    done
    echo "expected '$1', got:" && cat launch.log sshd-*.log && exit 1
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
    while number > 2500 and os.path.exists("slow"):
        time.sleep(0.1)
    time.sleep(0.05 if os.path.exists("slow") else 0)
    return jnp.float32(1)

for _ in dflow.distributed.Async(cluster).run(step, batches, steps=4000):
    pass
if cluster.elect("report"):
    print("count is", float(count), flush=True)
END
touch slow
"$python" -m dflow certs secret secret > certs.log
"$python" -m dflow launch --on ssh --hosts hosts --ssh "ssh -i $tmp/user -o UserKnownHostsFile=$tmp/known" \
    --python "$tmp/python" --ps 2 --workers 3 --secret-file secret --restart on-failure:9 --restart ps=on-failure:9 \
    --snapshots snapshots --snapshot-every 1 train.py > launch.log 2>&1 &
await "the first snapshot"
pkill -KILL -f -- "-m dflow task --job ps --index 1" && await "ps:1 runs again; when it has joined"
pkill -KILL -f -o "^$python train.py" && await "worker:[012] ended: killed by SIGKILL; it is started again"
pkill -KILL -f -- "-m dflow coordinator" && await "coordinator ended: killed by SIGKILL; it is started again"
ip link set to-h3 down && await "Timeout, server 10.66.0.3 not responding" && await "10.66.0.3 was not reached"
ip link set to-h3 up && await "ended: exit status 255; it is started again"
rm slow
wait $! || { cat launch.log; exit 1; }
await "count is 4000.0" && await "Steps: 4000 of 4000"
grep -E "dflow: |count is|Steps:" launch.log
! pgrep -f "launching.ssh_task" && echo "all that the launch had started has ended"
