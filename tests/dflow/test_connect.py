"""The cluster that a program joins: from arguments, from the environment, or none."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives import collectives, jax_runtime
from dflow.distributed.collectives.process_group import current_group
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.process import parent_watch
from dflow.distributed.transport.sockets import SocketTransport
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import ConfigError, DeadlineExceeded, SecurityError, StrategyError

SETTINGS = dflow.ClusterSettings(join_timeout_s=0.2)
VARIABLES = ("DFLOW_COORDINATOR", "DFLOW_JOB", "DFLOW_INDEX")
OTHERS = ("DFLOW_CLUSTER", "DFLOW_ADDRESS", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "TPU_WORKER_HOSTNAMES")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(parent_watch, "watch", lambda: None)


def test_a_process_that_nothing_launched_is_a_cluster_by_itself() -> None:
    threads, descriptors = {*threading.enumerate()}, os.listdir("/proc/self/fd")
    cluster = dflow.connect()
    assert isinstance(cluster, Cluster)
    assert (cluster.index, cluster.tasks) == (0, (cluster.task,))
    assert cluster.elect("anything")
    assert cluster.barrier("start") == (cluster.task,)
    assert [*dflow.distributed.Async(cluster).run(lambda batch: batch, range(9), steps=3)] == [0, 1, 2]
    cluster.report("accuracy", 0.5)
    assert cluster.results == {"accuracy": 0.5}
    assert {*threading.enumerate()} <= threads
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
    cluster.close()
    cluster.close()


def test_variables_of_a_process_by_itself_live_in_it() -> None:
    cluster = dflow.connect()
    with cluster.parameter_servers("any"):
        v = dflow.Variable(1.0)
    assert v.device is None
    dflow.jit(lambda: v.assign_add(1.0))()
    assert float(v) == 2.0
    assert cluster.traffic() == ()


@contextmanager
def coordinator_of(**jobs: int) -> Iterator[Coordinator]:
    with closing(make_coordinator(SocketTransport(), "127.0.0.1:0", jobs)) as coordinator:
        yield coordinator


@pytest.mark.parametrize(
    ("environment", "arguments", "task"),
    [
        (("HERE", "evaluator", "3"), {}, "/job:evaluator/task:3"),
        (("127.0.0.1:1", "evaluator", "0"), {"coordinator": "HERE", "index": 2}, "/job:worker/task:2"),
        (("HERE", "worker", "0"), {"job": "evaluator"}, "/job:evaluator/task:0"),
    ],
    ids=["environment", "address and index", "job"],
)
def test_arguments_come_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: tuple[str, ...], arguments: dict[str, Any], task: str
) -> None:
    job, index = split_task_name(task)
    with coordinator_of(**{job: index + 1}) as coordinator:
        here = {"HERE": coordinator.address}
        for name, value in zip(VARIABLES, environment, strict=True):
            monkeypatch.setenv(name, here.get(value, value))
        cluster = dflow.connect(**{name: here.get(value, value) for name, value in arguments.items()})
        assert (cluster.task, cluster.tasks) == (task, (task,))
        cluster.close()
        cluster.close()


def test_the_environment_or_an_argument_says_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOW_ADDRESS", "127.0.0.2")
    for address, listens in ((None, "127.0.0.2:"), ("127.0.0.3", "127.0.0.3:")):
        with coordinator_of(worker=1) as coordinator:
            cluster = dflow.connect(coordinator.address, index=0, address=address)
            assert cluster.server.address.startswith(listens)
            cluster.close()


def test_a_port_for_metrics_that_is_taken_leaves_no_task_behind() -> None:
    pytest.importorskip("prometheus_client")
    with coordinator_of(worker=1) as coordinator:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="metrics cannot be served"):
            dflow.connect(coordinator.address, index=0, metrics_port=taken.getsockname()[1])
        [info] = coordinator.status().tasks
        assert info.left.startswith("its connect() has failed: metrics cannot be served")


def test_workers_whose_collectives_did_not_start_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise StrategyError("no connection to the service", "open a port")

    monkeypatch.setattr(sys.modules["dflow.cluster"], "refuse_late_start", lambda: None)
    monkeypatch.setattr(collectives, "refuse_late_start", lambda: None)
    ended: list[int] = []
    with coordinator_of(worker=1) as coordinator:
        monkeypatch.setattr(jax_runtime, "_served", lambda *_: ("127.0.0.1:1", lambda: ended.append(1)))
        monkeypatch.setattr(jax_runtime, "_check_reached", failing)
        with pytest.raises(StrategyError, match="no connection to the service"):
            dflow.connect(coordinator.address, index=0, collectives=True)
        assert (current_group(), ended) == (None, [1])
        monkeypatch.setattr(collectives, "start_runtime", lambda *_: lambda: ended.append(2))
        with closing(dflow.connect(coordinator.address, index=0, collectives=True)):
            assert current_group() is not None
        lefts = [info.left for info in coordinator.status().tasks]
        assert (lefts, ended) == (["its connect() has failed: no connection to the service", "finished"], [1, 2])


def test_an_address_without_a_number_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOW_COORDINATOR", "127.0.0.1:1")
    monkeypatch.delenv("DFLOW_INDEX", raising=False)
    with pytest.raises(ConfigError, match="DFLOW_INDEX is not set, so it is not known which worker this is") as caught:
        dflow.connect()
    assert "start the script with `dflow launch`, set DFLOW_INDEX, or give connect() an index" in str(caught.value)


def test_an_address_that_nobody_answers_at_is_an_error() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at 127\.0\.0\.1:1 could not be reached within 0\.2 s"):
        dflow.connect("127.0.0.1:1", index=0, settings=SETTINGS)


def test_joining_that_takes_long_is_told_before_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["dflow.cluster"], "NOTICE_AFTER_S", 0.01)
    with pytest.raises(DeadlineExceeded):
        dflow.connect("127.0.0.1:1", index=0, settings=SETTINGS)
    [told] = [record.getMessage() for record in caplog.records if "is not in the cluster" in record.getMessage()]
    assert told.startswith(
        "worker:0 is not in the cluster after 0.01 s: the coordinator at 127.0.0.1:1 does not answer"
    )


def test_a_malformed_address_is_refused() -> None:
    with pytest.raises(ValueError, match="address 'nonsense' is not of the form 'host:port'"):
        dflow.connect("nonsense", index=0, settings=SETTINGS)


def test_a_cluster_file_says_where_and_the_arguments_who(tmp_path: Path) -> None:
    with coordinator_of(evaluator=2) as coordinator:
        path = tmp_path / "cluster.toml"
        path.write_text(f'coordinator = "{coordinator.address}"\n[jobs]\nevaluator = ["127.0.0.1", "127.0.0.2"]\n')
        cluster = dflow.connect(cluster=path, job="evaluator", index=1)
        [info] = cluster.coordinator.session.roster.tasks
        assert (info.task, info.address.partition(":")[0]) == ("/job:evaluator/task:1", "127.0.0.2")
        cluster.close()
        with pytest.raises(ConfigError, match=r"cluster\.toml has no job 'worker'; it has evaluator"):
            dflow.connect(cluster=path, index=0)


def test_half_of_a_schedulers_variables_is_an_error_and_not_a_cluster_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="Slurm: SLURM_PROCID is not set, which says a number; seen: SLURM_JOB_ID=7"):
        dflow.connect()


def test_another_machine_is_not_spoken_to_without_a_proof() -> None:
    with pytest.raises(SecurityError, match=r"10\.0\.0\.1:7711"):
        dflow.connect("10.0.0.1:7711", index=0, settings=SETTINGS)
