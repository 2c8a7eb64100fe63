"""The coordinator's process is killed and restarted while tasks continue."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.coordinator.coordinator import LISTENING
from dflow.distributed.wire.messages.roster import Roster
from dflow.distributed.wire.messages.rounds import ClaimSteps
from dflow.distributed.wire.messages.status import GetStatus
from tests.distributed.processes import Spawned

SERVERS = {"JAX_PLATFORMS": "cpu"}


def spawn_coordinator(tmp_path: Path, address: str) -> tuple[Spawned, str]:
    """Start a coordinator with its state in `tmp_path`; return the process and its address."""
    words = ("--job", "ps=1", "--job", "worker=1", "--address", address, "--state", str(tmp_path / "state"))
    process = Spawned("-m", "dflow", "coordinator", *words, cwd=tmp_path, **SERVERS)
    [line] = process.read_until(LISTENING)
    return process, line.removeprefix(LISTENING).strip()


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[tuple[Spawned, str]]:
    process, address = spawn_coordinator(tmp_path, "127.0.0.1:0")
    with process:
        yield process, address


def test_a_coordinator_that_is_killed_stops_no_step_and_its_successor_knows_all(
    coordinator: tuple[Spawned, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, address = coordinator
    words = ("-m", "dflow", "task", "--job", "ps", "--index", "0", "--coordinator", address)
    with Spawned(*words, cwd=tmp_path, **SERVERS) as task:
        worker = dflow.connect(address, index=0)
        assert isinstance(worker, Cluster)
        with worker.parameter_servers():
            total = dflow.Variable(np.zeros(3, np.float32), name="total")

        @dflow.jit
        def step(x: object) -> object:
            total.assign_add(x)
            return total.read()

        rosters: list[Roster] = []
        worker.coordinator.session.call_on_roster(rosters.append)
        claimed = worker.coordinator.ask(ClaimSteps("run", worker.task, 10)).steps
        step(jnp.ones(3))
        first.process.kill()
        first.process.wait()
        for _ in range(20):
            last = step(jnp.ones(3))
        np.testing.assert_array_equal(last, [21, 21, 21])  # type: ignore[arg-type]
        second, again = spawn_coordinator(tmp_path, address)
        with second:
            assert again == address
            later = worker.coordinator.ask(ClaimSteps("run", worker.task, 10, done=len(claimed))).steps
            assert later.start == claimed.stop
            with worker.parameter_servers():
                more = dflow.Variable(np.ones(2, np.float32), name="more")
            np.testing.assert_array_equal(more.read(), [1, 1])
            status = worker.coordinator.ask(GetStatus())
            assert [info.left for info in status.tasks] == ["", ""]
            assert [info.name for info in status.variables] == ["total", "more"]
            assert status.steps_done == len(claimed)
            assert rosters == rosters[:1]
            np.testing.assert_array_equal(step(jnp.ones(3)), [22, 22, 22])  # type: ignore[arg-type]
            worker.close()
            assert task.process.poll() is None
            for outage in (f"the connection to the coordinator at {address} has ended: ", "is back after "):
                task.read_until(f"ps:0: {outage}" if outage.startswith("the") else outage)
                assert caplog.text.count(outage) == 1
