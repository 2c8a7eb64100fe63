"""Launchers of other systems: `tpu_vm.sh` with a `gcloud` whose machines are folders here, and those of Kubernetes.

The scripts for Slurm are tried by `tests/launchers/try_slurm.sh`, which needs a Slurm. The chart is rendered by Helm's
own library, and `make golden` writes `cluster.yaml`, the chart with its default values.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflow.__main__ import make_parser
from dflow.distributed.detection.cluster_file import read_cluster_file
from dflow.distributed.detection.cluster_spec import ClusterSpec
from dflow.distributed.detection.detect import detect, found_cluster
from dflow.tracing.environment import VARIABLES, misspelt
from tests.distributed.launching.private_sshd import IS_HERE, private_sshd
from tests.examples.loading import ROOT
from tests.golden import UpdateMode

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
                cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=100,
            )  # fmt: skip
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


yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")


FOLDER = ROOT / "examples/kubernetes"
HEAD = """\
# A cluster with a pod for each role; each pod may fail. This is the chart in helm/ with its default
# values, rendered for the release `train`.
"""
#: The oldest and the newest version of Kubernetes that the manifests are for.
VERSIONS = ("1.28", "1.37")


def rendered(**values: Any) -> str:
    """Return the objects of the chart, in one text."""
    helm = pytest.importorskip("helm_python", reason="no Helm; pip install helm-python-sdk brings its library")
    assert helm.lint(str(FOLDER / "helm"))["errors"] == []
    with helm.Chart.load(str(FOLDER / "helm")) as chart:
        made = chart.render(values, name="train", namespace="default")
    return HEAD + "".join(f"---\n{made[name].strip()}\n" for name in sorted(made) if made[name].strip())


def objects(text: str) -> dict[str, Any]:
    """Return the objects of a manifest, by kind and name."""
    return {f"{each['kind']} {each['metadata']['name']}": each for each in yaml.safe_load_all(text)}


def check_schema(text: str) -> None:
    for each in objects(text).values():
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def containers(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for each in found.values():
        pod = each["spec"].get("template", {}).get("spec", {})
        for container in (*pod.get("initContainers", []), *pod.get("containers", [])):
            yield pod, container


def commands(container: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the command and those of the probes; `sh -c` is taken apart, for the pod number 1."""
    probes = (container.get(probe, {}).get("exec") for probe in ("readinessProbe", "livenessProbe"))
    for words in (container["command"], *(probe["command"] for probe in probes if probe)):
        yield words[2].removeprefix("exec ").replace("${HOSTNAME##*-}", "1").split() if words[0] == "sh" else words


def environment(container: dict[str, Any], hostname: str, index: str = "") -> dict[str, str]:
    """Return the environment of a pod with this host name, of an indexed Job if it has an index."""
    of_kubernetes = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": hostname}
    of_job = {"JOB_COMPLETION_INDEX": index} if index else {}
    return of_kubernetes | of_job | {each["name"]: each["value"] for each in container["env"]}


def detected(variables: dict[str, str]) -> ClusterSpec:
    spec = found_cluster(detect(variables, "", lambda key: None, read_cluster_file))
    assert spec is not None
    return spec


@pytest.mark.parametrize("name", ["job.yaml", "cluster.yaml"])
def test_a_manifest_is_valid_and_dflow_takes_its_commands_and_variables(name: str) -> None:
    text = (FOLDER / name).read_text()
    check_schema(text)
    found = objects(text)
    count = 0
    for pod, container in containers(found):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        claimed = {claim for each in found.values() for claim in claims(each)}
        assert mounts.keys() <= volumes | claimed
        for words in commands(container):
            if words[0] == "dflow":
                make_parser().parse_args(words[1:])
                count += 1
        names = {each["name"]: each["value"] for each in container.get("env", [])}
        assert not misspelt(names)
        assert {each for each in names if each.startswith("DFLOW_")} <= VARIABLES.keys()
        if "DFLOW_SECRET_FILE" in names:
            assert str(Path(names["DFLOW_SECRET_FILE"]).parent) in mounts.values()
    assert count == (5 if name == "cluster.yaml" else 0)


def claims(each: dict[str, Any]) -> list[str]:
    return [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])]


def test_the_pods_of_the_job_find_each_other() -> None:
    found = objects((FOLDER / "job.yaml").read_text())
    job, service = found["Job train"]["spec"], found["Service dflow"]
    (container,) = job["template"]["spec"]["containers"]
    spec = detected(environment(container, "train-3", "3"))
    assert (spec.task, spec.coordinator) == ("/job:worker/task:3", "train-0.dflow:7711")
    assert spec.jobs == {"ps": 4, "worker": job["completions"]}
    assert service["spec"]["selector"] == {"job-name": "train"}
    assert job["template"]["spec"]["subdomain"] == service["metadata"]["name"]


def test_the_roles_of_the_cluster_find_each_other() -> None:
    found = objects((FOLDER / "cluster.yaml").read_text())
    roles = {name: found[name]["spec"] for name in found if "template" in found[name]["spec"]}
    coordinator, ps, worker = (
        next(spec for name, spec in roles.items() if name.endswith(role)) for role in ("coordinator", "ps", "worker")
    )
    (container,) = worker["template"]["spec"]["containers"]
    spec = detected(environment(container, "train-worker-3", "3"))
    assert spec.task == "/job:worker/task:3"
    assert spec.starts == ()
    (container,) = ps["template"]["spec"]["containers"]
    assert detected(environment(container, "train-ps-1")).index == 1
    assert detected(environment(container, "train-ps-1")).coordinator == spec.coordinator
    # The coordinator is where they look for it, and expects as many tasks as there are pods.
    service = found["Service train"]["metadata"]["name"]
    assert coordinator["serviceName"] == ps["serviceName"] == worker["template"]["spec"]["subdomain"] == service
    assert spec.coordinator == f"train-coordinator-0.{service}:7711"
    (container,) = coordinator["template"]["spec"]["containers"]
    options = make_parser().parse_args(container["command"][1:])
    assert dict(options.jobs) == {"ps": ps["replicas"], "worker": worker["completions"]}
    assert options.address.endswith(":7711")
    assert worker["completions"] == worker["parallelism"]
    # All pods, and only they, are behind the Service and the policy.
    chosen = found["Service train"]["spec"]["selector"].items()
    assert found["NetworkPolicy train"]["spec"]["podSelector"]["matchLabels"].items() == chosen
    for spec_ in roles.values():
        assert chosen <= spec_["template"]["metadata"]["labels"].items()


def test_cluster_yaml_is_the_chart_with_its_default_values() -> None:
    text = rendered()
    if UpdateMode.on:
        (FOLDER / "cluster.yaml").write_text(text)
    assert (FOLDER / "cluster.yaml").read_text() == text


def test_the_chart_takes_the_values_of_the_page_and_refuses_misspelt_ones() -> None:
    (block,) = re.findall(r"```yaml\n(# values.yaml.*?)```", (ROOT / "docs/launchers.md").read_text(), re.DOTALL)
    values = yaml.safe_load(block)
    text = rendered(**values, storageClass="fast", env={"XLA_FLAGS": "--a=1"})
    check_schema(text)
    assert len(re.findall("storageClassName: fast", text)) == 2
    assert f"--job=ps={values['ps']['count']}" in text
    assert f"--job=worker={values['workers']['count']}" in text
    pod = objects(text)["Job train-worker"]["spec"]["template"]["spec"]
    assert pod["tolerations"] == values["workers"]["tolerations"]
    assert pod["containers"][0]["command"] == values["command"]
    assert {"name": "XLA_FLAGS", "value": "--a=1"} in pod["containers"][0]["env"]
    with pytest.raises(Exception, match="wrokers"):
        rendered(wrokers={"count": 8})


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kubectl_makes_the_secret_from_the_file(tmp_path: Path) -> None:
    for name in ("kustomization.yaml", "cluster.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "cluster.secret").write_text("of a test\n")
    done = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, check=True)
    check_schema(done.stdout)
    found = objects(done.stdout)
    assert found["Secret dflow-secret"]["data"]["cluster.secret"] == "b2YgYSB0ZXN0Cg=="
    assert len(found) == 6
