"""The scripts that launch elsewhere: `tpu_vm.sh` with a `gcloud` whose machines are folders of this one.

The scripts for Slurm are tried by `tests/launchers/try_slurm.sh`, which needs a Slurm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.distributed.launching.private_sshd import IS_HERE, private_sshd
from tests.examples.loading import ROOT

pytestmark = pytest.mark.once

SCRIPTS = sorted((ROOT / "examples/launchers").iterdir()) + sorted((ROOT / "tests/launchers").glob("*.sh"))

#: Keeps its command line, and does it in a folder for each machine. The slice has two hosts.
GCLOUD = """\
echo "gcloud $*" >> commands
machines=cpu
case "$*" in *tpu-vm*) machines="tpu0 tpu1" ;; esac
case "$*" in
*describe*) echo "127.0.0.2;127.0.0.3" ;;
*scp*) for machine in $machines; do cp dist/dflow-1.whl train.py $machine; done ;;
*ssh*)
    for last in "$@"; do :; done
    for machine in $machines; do (cd $machine && HOME=$PWD bash -c "${last#--command=}"); done ;;
esac
"""
#: `python3 -m venv venv`
PYTHON = """\
mkdir -p venv/bin
ln -s "$DFLOW_OF_TEST" venv/bin/dflow
ln -s "$PYTHON_OF_TEST" venv/bin/python
printf '#!/bin/sh\\necho "$*" > installed\\n' > venv/bin/pip
chmod +x venv/bin/pip
"""
TRAIN = """
import os
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.transport.security.configuration import choose_security
from dflow.distributed.transport.sockets import SocketTransport

task = f"/job:worker/task:{os.environ['DFLOW_INDEX']}"
transport = SocketTransport(security=choose_security(os.environ))
client = CoordinatorClient(transport, os.environ["DFLOW_COORDINATOR"], name=task)
client.join(task, "nowhere:1")
print("on", os.environ["SSH_CONNECTION"].split()[2], "as", task, flush=True)
client.leave()
"""


def make_program(path: Path, text: str) -> Path:
    path.write_text("#!/bin/bash\nset -e\n" + text)
    path.chmod(0o700)
    return path


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", "--severity=warning", *SCRIPTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_bash_reads_a_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(not IS_HERE, reason="sshd is not installed; the package openssh-server brings it")
def test_a_tpu_slice_is_made_used_and_deleted(tmp_path: Path) -> None:
    fakes = tmp_path / "fakes"
    for folder in (fakes, tmp_path / "dist", tmp_path / "sshd"):
        folder.mkdir()
    for machine in ("cpu", "tpu0", "tpu1"):
        (tmp_path / machine / ".ssh").mkdir(parents=True)
    (tmp_path / "dist/dflow-1.whl").touch()
    (tmp_path / "train.py").write_text(TRAIN)
    with private_sshd(tmp_path / "sshd") as sshd:
        make_program(fakes / "gcloud", GCLOUD)
        make_program(fakes / "sudo", "")
        make_program(fakes / "python3", PYTHON)
        make_program(fakes / "ssh", f'exec {shutil.which("ssh")} {" ".join(sshd.ssh[1:])} "$@"\n')
        dflow = make_program(fakes / "dflow", f'exec {sshd.python} -m dflow "$@"\n')
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")},
            "PATH": f"{fakes}:{os.environ['PATH']}",
            "ZONE": "us-central2-b",
            "SERVERS": "0",
            "DFLOW_OF_TEST": str(dflow),
            "PYTHON_OF_TEST": str(sshd.python),
        }
        output = ""
        for step in ("create", "install", "train", "delete"):
            done = subprocess.run(
                [ROOT / "examples/launchers/tpu_vm.sh", step],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=100,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            output += done.stdout
    assert (tmp_path / "tpu1/installed").read_text() == "install jax[tpu] dflow-1.whl[security]\n"
    assert (tmp_path / "cpu/.ssh/id_ed25519.pub").read_text() == (tmp_path / "tpu1/.ssh/authorized_keys").read_text()
    assert not (tmp_path / "tpu0/cluster.secret").exists()
    assert (tmp_path / "cpu/hosts").read_text() == f"{os.uname().nodename} slots=0\n127.0.0.2\n127.0.0.3\n"
    for index in range(2):
        assert f"[worker:{index}] on 127.0.0.1 as /job:worker/task:{index}\n" in output, output
    commands = (tmp_path / "commands").read_text().splitlines()
    assert [line.partition("--")[0].split()[1:-1] for line in commands if " delete " in line or " create " in line] == [
        ["compute", "tpus", "tpu-vm", "create"],
        ["compute", "instances", "create"],
        ["compute", "tpus", "tpu-vm", "delete"],
        ["compute", "instances", "delete"],
    ]
    assert all("--zone=us-central2-b" in line for line in commands if line.startswith("gcloud"))
