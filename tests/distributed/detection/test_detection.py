"""The cluster of an environment: a file, variables, SLURM, pods and TPU slices; lists of hosts; this host."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.detection.cluster_file import ClusterFile, parse_cluster_file, read_cluster_file
from dflow.distributed.detection.cluster_spec import ClusterSpec, Finding, SecuritySource
from dflow.distributed.detection.detect import detect, explained, found_cluster
from dflow.distributed.detection.slurm import expanded
from dflow.distributed.detection.this_host import listening_address, own_host, read_metadata
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.tracing.errors import ConfigError, DeadlineExceeded
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
    ("pod", "index"), [(indexed_job(3), 3), (stateful_set(12), 12), (indexed_job(3, DFLOW_INDEX="7"), 7)]
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
    more = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "first-0.tpu:8080"}
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


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('coordinator = "h:7"\n[jobs]\nps = 2\nworker = ["a", "b:1"]\n[security]\nsecret_file = "s"\n')
    file = read_cluster_file(str(path))
    assert file.counts == {"ps": 2, "worker": 2}
    spec = file.spec("worker", 1)
    assert (spec.coordinator, spec.task, spec.listens) == ("h:7", "/job:worker/task:1", "b:1")
    assert spec.security.secret_file == tmp_path / "s"
    assert file.spec("ps", 0).listens == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coordinator", "the cluster file c.toml is no TOML: "),
        ("[jobs]\nps = 1", "c.toml has coordinator = None; write where it listens"),
        ('coordinator = "h"', "has coordinator = 'h'; write where it listens"),
        (
            'coordinator = "h:7"\nworkers = 3',
            "c.toml has 'workers', which means nothing; legal are coordinator, jobs, s",
        ),
        ('coordinator = "h:7"\njobs = 3', "jobs and security are tables"),
        ('coordinator = "h:7"\n[jobs]\nps = -1', "ps = -1; write how many tasks there are, or a list"),
        ('coordinator = "h:7"\n[jobs]\nps = true', "ps = True; write how many"),
        ('coordinator = "h:7"\n[jobs]\nps = [""]', "write how many tasks there are, or a list"),
        ('coordinator = "h:7"\n[security]\nkey = "x"', r"c.toml \[security\] has 'key', which means nothing"),
        ('coordinator = "h:7"\n[security]\nsecret_file = 3', "secret_file = 3; write a path"),
    ],
)
def test_a_mistake_is_named_with_the_file(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_cluster_file("c.toml", text)


def test_a_task_that_is_not_in_the_file_is_refused() -> None:
    file = parse_cluster_file("c.toml", 'coordinator = "h:7"\n[jobs]\nps = 2')
    with pytest.raises(ConfigError, match=r"c\.toml has 2 tasks of job 'ps', numbered from 0, and no ps:2"):
        file.spec("ps", 2)
    with pytest.raises(ConfigError, match=r"c\.toml has no job 'worker'; it has ps"):
        file.spec("worker", 0)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_cluster_file(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node001", ["node001"]),
        ("node001,host2", ["node001", "host2"]),
        ("node[001-003],host2", ["node001", "node002", "node003", "host2"]),
        ("node[001,007-009],host2", ["node001", "node007", "node008", "node009", "host2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[0-1]n[1,3]x", ["r0n1x", "r0n3x", "r1n1x", "r1n3x"]),
        ("a-1.example.org,b", ["a-1.example.org", "b"]),
    ],
)
def test_lists_are_written_out_in_order(short: str, names: list[str]) -> None:
    assert expanded(short) == names


@pytest.mark.parametrize("short", ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1-]", "n[a-b]", "n[3-1]", "a b"])
def test_a_text_that_is_no_list_of_hosts_is_refused(short: str) -> None:
    with pytest.raises(ConfigError, match="is no list of hosts; one looks like node1,node"):
        expanded(short)


@pytest.mark.parametrize("short", ["n[1-999999999]", "n[0-9999]m[0-9999]"])
def test_a_list_that_would_fill_the_memory_is_refused(short: str) -> None:
    with pytest.raises(ConfigError, match="stands for more than 1048576 hosts"):
        expanded(short)


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 99), st.integers(0, 20)), min_size=1))
def test_ranges_keep_width_and_order(parts: list[tuple[str, int, int]]) -> None:
    short = ",".join(f"{prefix}[{first:03d}-{first + more:03d}]" for prefix, first, more in parts)
    names = [f"{prefix}{number:03d}" for prefix, first, more in parts for number in range(first, first + more + 1)]
    assert expanded(short) == names


@given(st.text(alphabet="n0123456789[]-, ", max_size=30))
def test_any_text_gives_names_or_a_clear_refusal(short: str) -> None:
    try:
        names = expanded(short)
    except ConfigError:
        return
    assert names
    assert not any(sign in name for name in names for sign in "[], ")


class _Answers(http.server.BaseHTTPRequestHandler):
    """Serves attributes to requests with Google's header; `busy` fails once, and `broken` always."""

    failures = 0

    def do_GET(self) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self.send_error(403)
        elif self.path == "/computeMetadata/v1/instance/attributes/busy" and _Answers.failures < 1:
            _Answers.failures += 1
            self.send_error(503)
        elif self.path.startswith("/computeMetadata/v1/instance/attributes/b"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"3")
        elif self.path.endswith("/broken"):
            self.send_error(500)
        else:
            self.send_error(404)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{served.server_port}"
        served.shutdown()


def test_attributes_are_read_past_a_failure_and_past_a_proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    environment = {"GCE_METADATA_HOST": server}
    assert read_metadata(environment, "busy") == "3"
    assert read_metadata(environment, "nothing") is None


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the metadata server did not give 'key' within 0\.1 s: "):
        read_metadata({"GCE_METADATA_IP": "127.0.0.1:1"}, "key", timeout_s=0.1)


@pytest.mark.parametrize(
    "coordinator", ["127.0.0.1:7", "localhost:7", "[::1]:7", "unix:/run/c", "127.0.0.1:7;unix:/run/c@host"]
)
def test_a_coordinator_on_this_machine_alone_is_reached_by_loopback(coordinator: str) -> None:
    assert own_host(coordinator) == "127.0.0.1"


def test_a_name_that_nobody_knows_yet_or_that_is_ones_own_gives_the_address_of_the_default_route() -> None:
    elsewhere = own_host("192.0.2.77:7")
    assert own_host("no.such.host.invalid:7") == elsewhere
    own = own_host(f"{socket.gethostname()}:7")
    assert own.startswith("127.") == elsewhere.startswith("127."), "others cannot use what its name stands for here"


@pytest.mark.parametrize(
    ("said", "coordinator", "address"),
    [
        ("10.0.0.9", "h:7", "10.0.0.9:0;unix:"),
        ("10.0.0.9:5", "h:7", "10.0.0.9:5;unix:"),
        ("fd00::2", "h:7", "[fd00::2]:0;unix:"),
        ("[fd00::2]:5", "h:7", "[fd00::2]:5;unix:"),
        ("unix:/run/x", "h:7", "unix:/run/x"),
        ("127.0.0.3", "127.0.0.1:7", "127.0.0.3:0;unix:"),
        ("", "127.0.0.1:7", LOCAL_ADDRESS),
        ("", "127.0.0.1:7;unix:/run/x@host", LOCAL_ADDRESS),
    ],
)
def test_a_task_listens_where_it_is_told_or_where_the_coordinator_is_reached_from(
    said: str, coordinator: str, address: str
) -> None:
    assert listening_address(said, coordinator) == address
