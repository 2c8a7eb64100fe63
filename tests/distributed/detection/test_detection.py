"""The task and cluster of a process in each recorded environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from dflow.distributed.detection.cluster_file import ClusterFile, parse_cluster_file
from dflow.distributed.detection.cluster_spec import ClusterSpec, Finding, SecuritySource
from dflow.distributed.detection.detect import detect, explained, found_cluster
from dflow.tracing.errors import ConfigError
from tests.distributed.detection.recorded import (
    GOOGLE,
    SBATCH,
    TPU_VM,
    TPU_VM_OF_TWO_SLICES,
    gke_tpu,
    indexed_job,
    slurm,
    stateful_set,
)

FILE = """
coordinator = "10.0.0.1:7711"
[jobs]
ps = ["10.0.0.1:7712", "10.0.0.2"]
worker = 3
[security]
certificates = "certificates"
"""


def nowhere(key: str) -> str | None:
    raise AssertionError(f"the metadata server was asked for {key}")


def detected(
    environment: Mapping[str, str], product: str = "", metadata: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    def read(path: str) -> ClusterFile:
        return parse_cluster_file(path, FILE)

    return detect(environment, product, nowhere if metadata is None else metadata.get, read)


def found(environment: Mapping[str, str], product: str = "", metadata: Mapping[str, str] | None = None) -> ClusterSpec:
    spec = found_cluster(detected(environment, product, metadata))
    assert spec is not None
    return spec


def why_alone(environment: Mapping[str, str], source: str, product: str = "", metadata: Mapping[str, str] = {}) -> str:
    findings = detected(environment, product, metadata)
    assert found_cluster(findings) is None
    return next(finding.why for finding in findings if finding.source == source)


def test_a_bare_environment_is_alone_and_every_kind_was_asked() -> None:
    findings = detected({"PATH": "/bin"})
    assert found_cluster(findings) is None
    assert [finding.source for finding in findings] == [
        "cluster file",
        "DFLOW_* variables",
        "Slurm",
        "Kubernetes",
        "TPU VM",
    ]
    assert explained(findings, {}).endswith("This process is alone: dflow.connect() gives a cluster of one.")


# A file, and DFLOW_* variables.


def test_a_file_comes_first_and_says_where_each_task_listens() -> None:
    said = {
        "DFLOW_CLUSTER": "dir/c.toml",
        "DFLOW_JOB": "ps",
        "DFLOW_INDEX": "1",
        "DFLOW_COORDINATOR": "x:1",
        **slurm(3),
    }
    assert found(said) == ClusterSpec(
        "10.0.0.1:7711",
        "ps",
        1,
        {"ps": 2, "worker": 3},
        listens="10.0.0.2",
        security=SecuritySource(certificates=Path("dir/certificates")),
    )
    assert found({**said, "DFLOW_JOB": "", "DFLOW_ADDRESS": "10.0.0.9:5"}).listens == "10.0.0.9:5"


def test_variables_come_before_schedulers() -> None:
    said = {"DFLOW_COORDINATOR": "h:7", "DFLOW_INDEX": "2", "DFLOW_ADDRESS": "10.0.0.9"}
    assert found({**slurm(3), **said}) == ClusterSpec("h:7", "worker", 2, listens="10.0.0.9")
    assert found({**said, "DFLOW_JOB": "evaluator"}).job == "evaluator"


@pytest.mark.parametrize(
    ("pod", "index"),
    [(indexed_job(3), 3), (stateful_set(12), 12), (indexed_job(3, DFLOW_INDEX="7"), 7)],
)
def test_a_pods_number_is_its_index_when_nobody_says_another(pod: dict[str, str], index: int) -> None:
    assert found({**pod, "DFLOW_COORDINATOR": "coordinator.dflow:7711"}).index == index


@pytest.mark.parametrize(("index", "said"), [("", "not set"), ("two", "'two'"), ("-1", "'-1'")])
def test_a_coordinator_without_an_index_is_refused(index: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"DFLOW_INDEX is {said}, so it is not known which worker this is"):
        detected({"DFLOW_COORDINATOR": "h:7", "DFLOW_INDEX": index})


@pytest.mark.parametrize(("name", "value"), [("DFLOW_INDEX", "0"), ("DFLOW_JOB", "evaluator")])
def test_a_task_of_no_cluster_is_refused_and_a_misspelt_variable_shown(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, .* set here: DFLOW_COORDINATER\n") as caught:
        detected({name: value, "DFLOW_COORDINATER": "h:7"})
    assert f"to run alone, unset {name}" in str(caught.value)


# Slurm.


def test_each_process_of_a_slurm_step_is_a_worker_and_all_agree_on_the_coordinator() -> None:
    specs = [found(slurm(number)) for number in range(10)]
    assert [(spec.job, spec.index) for spec in specs] == [("worker", number) for number in range(10)]
    assert {spec.coordinator for spec in specs} == {f"node08:{20480 + 200505 % 8192}"}
    assert all(spec.jobs == {"ps": 5, "worker": 10} for spec in specs)


def test_the_first_process_starts_the_coordinator_and_the_first_of_each_node_a_stock_task() -> None:
    starts = [found(slurm(number)).starts for number in range(10)]
    assert starts[0] == ("coordinator", "/job:ps/task:0")
    assert [s for s in starts[1:] if s] == [(f"/job:ps/task:{node}",) for node in range(1, 5)]
    assert starts[1::2] == [()] * 5
    many = [found({**slurm(number), "DFLOW_PS": "7"}) for number in range(10)]
    assert sorted(task for spec in many for task in spec.starts if task != "coordinator") == [
        f"/job:ps/task:{index}" for index in range(7)
    ]
    assert many[2].jobs == {"ps": 7, "worker": 10}
    none = found({**slurm(0), "DFLOW_PS": "0"})
    assert (none.starts, none.jobs) == (("coordinator",), {"worker": 10})


def test_the_port_differs_by_step_and_can_be_said() -> None:
    assert found({**slurm(0), "SLURM_STEP_ID": "4"}).coordinator.endswith(f":{20480 + 200509 % 8192}")
    assert found({**slurm(0), "DFLOW_PORT": "9000"}).coordinator == "node08:9000"


def test_a_batch_script_outside_of_srun_and_a_step_of_one_are_alone() -> None:
    assert "not started by srun: SLURM_STEP_NODELIST is not set" in why_alone(SBATCH, "Slurm")
    one = {**slurm(0, nodes="n1", per_node=1, nodes_count=1)}
    assert "a step of one process" in why_alone(one, "Slurm")


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"])
def test_a_missing_variable_is_named_with_those_that_were_seen(missing: str) -> None:
    said = {name: value for name, value in slurm(3).items() if name != missing}
    with pytest.raises(
        ConfigError, match=f"Slurm: {missing} is not set, which says a number; seen: SLURM_JOB_ID=200505,"
    ):
        detected(said)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"SLURM_PROCID": "x"}, "Slurm: SLURM_PROCID is 'x', but has to be a number"),
        ({"SLURM_PROCID": "10"}, "process 10 of 10 on node 1 of 5"),
        ({"SLURM_NODEID": "5"}, r"process 3 of 10 on node 5 of 5 \(node\[08-11\],gpu3\) cannot be"),
        ({"SLURM_STEP_NODELIST": "n[3"}, "'n\\[3' is no list of hosts"),
        ({"SLURM_HET_SIZE": "2"}, "this is a heterogeneous job"),
    ],
)
def test_an_environment_of_slurm_that_contradicts_itself_is_refused(changes: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        detected({**slurm(3), **changes})


# Kubernetes.


@pytest.mark.parametrize(("pod", "name"), [(indexed_job, "train"), (stateful_set, "trainer")])
def test_pods_behind_a_service_are_workers(pod: object, name: str) -> None:
    assert callable(pod)
    specs = [found(pod(number, DFLOW_SERVICE="dflow", DFLOW_WORKERS="3", DFLOW_PS="2")) for number in range(3)]
    assert {spec.coordinator for spec in specs} == {f"{name}-0.dflow:7711"}
    assert [spec.index for spec in specs] == [0, 1, 2]
    assert [spec.starts for spec in specs] == [("coordinator", "/job:ps/task:0"), ("/job:ps/task:1",), ()]


def test_a_pod_that_is_told_of_no_cluster_is_alone() -> None:
    assert "a pod without the settings of a cluster" in why_alone(indexed_job(2), "Kubernetes")


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"DFLOW_WORKERS": "3"},
            "Kubernetes: DFLOW_SERVICE is not set, which says by which name pods are reached; seen: K",
        ),
        ({"DFLOW_SERVICE": "d"}, "Kubernetes: DFLOW_WORKERS is not set, which says how many pods there are; seen: KUB"),
        ({"DFLOW_SERVICE": "d", "DFLOW_WORKERS": "2"}, "train-2 is pod 2, but DFLOW_WORKERS is 2"),
        ({"DFLOW_SERVICE": "d", "DFLOW_WORKERS": "3", "HOSTNAME": "box"}, "the host name 'box' does not end in -2"),
        ({"DFLOW_SERVICE": "d", "DFLOW_WORKERS": "3", "HOSTNAME": ""}, "HOSTNAME is not set, which says which pod"),
    ],
)
def test_half_of_a_cluster_is_refused_with_what_is_missing(more: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        detected(indexed_job(2, **more))


# TPU hosts.


def test_hosts_of_a_slice_on_gke_are_workers() -> None:
    specs = [found(gke_tpu(number)) for number in range(4)]
    assert {spec.coordinator for spec in specs} == {"job-0.tpu:7711"}
    assert [(spec.index, spec.starts[-1]) for spec in specs] == [(n, f"/job:ps/task:{n}") for n in range(4)]
    addresses = "TPU_PROCESS_ADDRESSES"
    assert found(gke_tpu(0, **{addresses: "10.0.0.5:8471,10.0.0.6:8471"})).coordinator == "10.0.0.5:7711"


def test_slices_follow_each_other() -> None:
    more = {
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "first-0.tpu:8080",
    }
    spec = found(gke_tpu(1, **more))
    assert (spec.coordinator, spec.index, spec.jobs) == ("first-0.tpu:7711", 9, {"ps": 12, "worker": 12})
    del more["MEGASCALE_COORDINATOR_ADDRESS"]
    with pytest.raises(
        ConfigError, match="MEGASCALE_COORDINATOR_ADDRESS is not set, which says where the first of sev"
    ):
        detected(gke_tpu(1, **more))


def test_a_tpu_vm_is_known_by_its_metadata() -> None:
    spec = found({}, GOOGLE, TPU_VM)
    assert (spec.coordinator, spec.index, spec.jobs) == ("10.130.0.5:7711", 2, {"ps": 3, "worker": 3})
    spec = found({}, GOOGLE, TPU_VM_OF_TWO_SLICES)
    assert (spec.coordinator, spec.index, spec.jobs) == ("10.130.0.5:7711", 3, {"ps": 4, "worker": 4})


def test_the_metadata_server_is_asked_on_googles_machines_with_chips_only() -> None:
    for environment, product in (({}, "Latitude 5400"), ({"TPU_SKIP_MDS_QUERY": "1"}, GOOGLE)):
        findings = detected(environment, product)
        assert "no TPU host" in findings[-1].why
    assert "its metadata has no agent-worker-number" in why_alone({}, "TPU VM", GOOGLE)


def test_the_only_host_of_a_slice_is_a_cluster_of_one() -> None:
    one = {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
    assert "the only host of its slice" in why_alone(one, "TPU VM")


@pytest.mark.parametrize(
    ("environment", "metadata", "text"),
    [
        (gke_tpu(4), {}, "this is host 4, but there are 4: job-0.tpu, job-1.tpu"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b"},
            {},
            "TPU_WORKER_ID is not set, which says a number; seen: TPU_WORKER_HOSTNAMES=a",
        ),
        ({}, {"agent-worker-number": "0"}, "agent-worker-number '0' and worker-network-endpoints '', which do not say"),
        ({}, {**TPU_VM, "worker-network-endpoints": "a:b"}, "the endpoint 'a:b' in the metadata is neither"),
        (gke_tpu(0, MEGASCALE_NUM_SLICES="two"), {}, "MEGASCALE_NUM_SLICES is 'two', but has to be a number"),
    ],
)
def test_half_of_a_slice_is_refused(environment: dict[str, str], metadata: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        detected(environment, GOOGLE, metadata)


def test_the_explanation_says_what_was_seen_and_what_follows() -> None:
    environment = {**slurm(0), "DFLOW_SECRET_FILE": "/run/secret"}
    lines = explained(detected(environment), environment).splitlines()
    assert lines[:3] == [
        "- cluster file: DFLOW_CLUSTER is not set",
        "- DFLOW_* variables: DFLOW_COORDINATOR is not set",
        "+ Slurm: process 0 of a step of 10 on 5 nodes",
    ]
    assert "    SLURM_STEP_NODELIST=node[08-11],gpu3" in lines
    cluster = "worker:0 of the cluster with its coordinator at node08:24377 (ps=5, worker=10)"
    assert lines[-2:] == [
        f"This process is {cluster} and starts coordinator, ps:0.",
        "Its proof of who it is lies in /run/secret.",
    ]
    assert "It has no certificate and no secret" in explained(detected(slurm(0)), {})
    file = {"DFLOW_CLUSTER": "c.toml", "DFLOW_INDEX": "0"}
    assert explained(detected(file), file).endswith("lies in certificates.")
