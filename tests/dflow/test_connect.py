"""Which cluster a program joins: what it is told, what the environment says, or none."""

from __future__ import annotations

import pytest

import dflow
from dflow.distributed import lifeline
from dflow.distributed.alone import Alone
from dflow.distributed.cluster import Cluster
from dflow.distributed.coordinator import Coordinator
from dflow.distributed.transport.sockets import SocketTransport
from dflow.tracing.errors import ConfigError, DeadlineExceeded

SETTINGS = dflow.ClusterSettings(join_timeout_s=0.2)
VARIABLES = ("DFLOW_COORDINATOR", "DFLOW_JOB", "DFLOW_INDEX")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lifeline, "watch", lambda: None)


def test_nobody_launched_this() -> None:
    cluster = dflow.connect()
    assert isinstance(cluster, Alone)
    assert cluster.index == 0
    assert cluster.tasks == (cluster.task,)
    assert cluster.elect("anything")
    cluster.report("accuracy", 0.5)
    assert cluster.results == {"accuracy": 0.5}
    cluster.close()


def test_alone_takes_the_calls_that_a_cluster_takes() -> None:
    names = [name for name in dir(Cluster) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(Alone(), name)]
    assert set(missing) <= {"place", "request", "run_step", "runner"}, "what serves dflow, not its users"
    with Alone().parameter_servers("ps"):
        assert dflow.Variable(1.0).device is None


def test_the_environment_says_where_and_who(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(SocketTransport(), "127.0.0.1:0", {"evaluator": 4})
    for name, value in zip(VARIABLES, (coordinator.address, "evaluator", "3"), strict=True):
        monkeypatch.setenv(name, value)
    cluster = dflow.connect()
    assert (cluster.task, cluster.index) == ("/job:evaluator/task:3", 3)
    assert cluster.tasks == ("/job:evaluator/task:3",)
    cluster.close()
    cluster.close()
    coordinator.close()


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(SocketTransport(), "127.0.0.1:0", {"worker": 3})
    for name, value in zip(VARIABLES, ("127.0.0.1:1", "evaluator", "0"), strict=True):
        monkeypatch.setenv(name, value)
    cluster = dflow.connect(coordinator.address, index=2)
    assert cluster.task == "/job:worker/task:2"
    cluster.close()
    coordinator.close()


def test_the_job_given_comes_before_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = Coordinator(SocketTransport(), "127.0.0.1:0", {"evaluator": 1})
    for name, value in zip(VARIABLES, (coordinator.address, "worker", "0"), strict=True):
        monkeypatch.setenv(name, value)
    cluster = dflow.connect(job="evaluator")
    assert cluster.task == "/job:evaluator/task:0"
    cluster.close()
    coordinator.close()


@pytest.mark.parametrize("index", ["", "two", "-1"])
def test_an_address_without_a_number_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, index: str) -> None:
    monkeypatch.setenv("DFLOW_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setenv("DFLOW_INDEX", index)
    with pytest.raises(
        ConfigError, match=f"DFLOW_INDEX is {index!r}, so it is not known which worker this is"
    ) as caught:
        dflow.connect()
    assert "start the script with `dflow launch`, or give connect() an index" in str(caught.value)


def test_an_address_nobody_answers_at() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at 127\.0\.0\.1:1 could not be reached within 0\.2 s"):
        dflow.connect("127.0.0.1:1", index=0, settings=SETTINGS)


def test_an_address_that_is_none() -> None:
    with pytest.raises(ValueError, match="address 'nonsense' is not of the form 'host:port'"):
        dflow.connect("nonsense", index=0, settings=SETTINGS)
