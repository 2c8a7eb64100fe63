#!/bin/bash
# Train on a TPU slice: a worker on each of its hosts; the coordinator, the task servers and the launcher on a machine
# without TPUs, which starts the workers by ssh, and again when they fail:
#   export ZONE=us-central2-b; for step in create install train delete; do examples/launchers/tpu_vm.sh $step; done
# TPU, TYPE, SCRIPT and SERVERS have other names, sizes and numbers of task servers. Needs `gcloud` with a project, and
# dist/dflow-*.whl (`make wheel`).
set -euo pipefail
TPU=${TPU:-dflow} ZONE=${ZONE:?set ZONE, such as us-central2-b} TYPE=${TYPE:-v4-32}
SCRIPT=${SCRIPT:-train.py} SERVERS=${SERVERS:-2}

on_tpu() { gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"; }
on_cpu() { gcloud compute ssh "$TPU-cpu" --zone="$ZONE" --command="$1"; }
install_with() { echo "python3 -m venv venv && venv/bin/pip install $1 \"\$(echo dflow-*.whl)[security]\""; }

case ${1:-} in
create)
    gcloud compute tpus tpu-vm create "$TPU" --zone="$ZONE" --accelerator-type="$TYPE" --version=tpu-ubuntu2204-base
    gcloud compute instances create "$TPU-cpu" --zone="$ZONE" --machine-type=n2-highmem-16 --boot-disk-size=200GB \
        --image-family=ubuntu-2204-lts --image-project=ubuntu-os-cloud
    ;;
install)
    gcloud compute tpus tpu-vm scp dist/dflow-*.whl "$SCRIPT" "$TPU": --zone="$ZONE" --worker=all
    gcloud compute scp dist/dflow-*.whl "$SCRIPT" "$TPU-cpu": --zone="$ZONE"
    on_tpu "sudo apt-get install -y python3-venv && $(install_with "'jax[tpu]'")"
    on_cpu "sudo apt-get install -y python3-venv && $(install_with '')"
    # The secret stays on the launcher's machine: ssh hands it on. A key of that machine opens the hosts, and itself.
    on_cpu 'venv/bin/dflow certs secret cluster.secret && ssh-keygen -q -t ed25519 -N "" -f .ssh/id_ed25519'
    key=$(on_cpu 'tee -a .ssh/authorized_keys < .ssh/id_ed25519.pub')
    on_tpu "echo '$key' >> .ssh/authorized_keys"
    ;;
train)
    hosts=$(gcloud compute tpus tpu-vm describe "$TPU" --zone="$ZONE" --format='value(networkEndpoints[].ipAddress)' |
        tr -s ';,' ' ')
    on_cpu "{ echo \"\$(hostname) slots=0\"; printf '%s\n' $hosts; } > hosts &&
        venv/bin/dflow launch --on ssh --hosts hosts --ssh 'ssh -o StrictHostKeyChecking=accept-new' \
        --python venv/bin/python --ps $SERVERS --workers $(wc -w <<< "$hosts") --secret-file cluster.secret \
        --restart on-failure --restart ps=on-failure --snapshots snapshots $SCRIPT"
    ;;
delete)
    gcloud compute tpus tpu-vm delete "$TPU" --zone="$ZONE" --quiet
    gcloud compute instances delete "$TPU-cpu" --zone="$ZONE" --quiet
    ;;
*) echo "expected create, install, train or delete, got '${1:-}'" >&2 && exit 2 ;;
esac
