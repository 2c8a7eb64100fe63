import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import start_task
from dflow.distributed.transport.base import Handler
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.errors import RemoteError
from tests.distributed.processes import DEADLINE_S, Spawned

PS0 = "/job:ps/task:0"


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = make_coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1})
    yield made
    made.close()


def spawn(coordinator: Coordinator, tmp_path: Path, *more: str) -> Spawned:
    words = ("-m", "dflow", "task", "--job", "ps", "--index", "0", "--coordinator", coordinator.address, *more)
    return Spawned(*words, cwd=tmp_path, JAX_PLATFORMS="cpu")


def joined(coordinator: Coordinator) -> CoordinatorClient:
    """A client that has seen the task join."""
    client = CoordinatorClient(SocketTransport(), coordinator.address, name="/job:worker/task:0")
    client.join("/job:worker/task:0", "nowhere:0")
    client.wait_for_tasks([PS0], timeout_s=DEADLINE_S)
    return client


def test_a_stock_task_joins_and_leaves_quietly_at_sigterm(coordinator: Coordinator, tmp_path: Path) -> None:
    with spawn(coordinator, tmp_path) as task:
        client = joined(coordinator)
        task.process.send_signal(signal.SIGTERM)
        assert task.finish() == (0, "")
    assert [info.left for info in client.ask(GetStatus()).tasks if info.task == PS0] == ["stopped"]
    client.close()


def test_a_stock_task_ends_when_there_was_no_coordinator_for_too_long(coordinator: Coordinator, tmp_path: Path) -> None:
    with spawn(coordinator, tmp_path, "--coordinator-timeout", "0") as task:
        client = joined(coordinator)
        coordinator.close()
        status, output = task.finish()
    assert status == 1
    assert f"ps:0: the coordinator at {coordinator.address} is lost: it could not be reached for" in output
    client.close()


def test_a_task_whose_name_is_taken_listens_no_longer() -> None:
    network = MemoryNetwork()
    coordinator = make_coordinator(network, "", {"ps": 1})
    first = start_task(network, PS0, coordinator.address, "memory:first")
    with pytest.raises(RemoteError, match="ps:0 is already live at memory:first"):
        start_task(network, PS0, coordinator.address, "memory:second")
    network.listen("memory:second", name=PS0, handler=Handler()).close()
    first.close()
    coordinator.close()


def test_a_task_whose_address_is_taken_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    network = MemoryNetwork()
    coordinator = make_coordinator(network, "", {"ps": 1})
    taken = network.listen("memory:taken", name=PS0, handler=Handler())
    closed: list[str] = []
    monkeypatch.setattr(CoordinatorClient, "close", lambda client, why: closed.append(why))
    with pytest.raises(OSError, match="memory:taken"):
        start_task(network, PS0, coordinator.address, "memory:taken")
    assert closed == ["could not join"]
    monkeypatch.undo()
    taken.close()
    coordinator.close()


AFTER_WARM_UP = """
import sys
import numpy as np
from dflow.distributed.cluster.stock_task import warm_up
from dflow.lowering.programs.program import export_program, load_program
from dflow.lowering.values.first_value import first_value
from dflow.tracing.ir.types import ArrayType
warm_up('ps')
before = {*sys.modules}
rows = ArrayType(np.dtype("float32"), (3, 2))
first_value("v", rows, lambda: np.ones((3, 2), np.float32), None)
load_program(export_program(lambda v, x: [v * x], [rows, rows]), 1)
print(sorted({*sys.modules} - before))
"""


def test_a_task_that_has_warmed_up_imports_nothing_for_its_first_program() -> None:
    words = [sys.executable, "-c", AFTER_WARM_UP]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert ran.stdout == "[]\n"


#: A task that SIGTERM ends when a function of its join has returned, before or after it is a task.
SIGNALLED = """
import signal, threading
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.cluster import stock_task
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.task_role import run_task
from dflow.distributed.transport.memory import MemoryNetwork
network, stop = MemoryNetwork(), StopSignal()
coordinator = make_coordinator(network, "", {"ps": 1})
places = [(SessionDriver, "start"), (CoordinatorClient, "join"), (stock_task, "joined_server")]
for index, (owner, name) in enumerate(places):
    inner = getattr(owner, name)
    def outer(*args, **named):
        setattr(owner, name, inner)
        found = inner(*args, **named)
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait()
        return found
    setattr(owner, name, outer)
    try:
        run_task(stop, network, f"/job:ps/task:{index}", coordinator.address, "")
    except SystemExit as error:
        print(error.code, end=" ")
print([(info.task[-1], info.left) for info in coordinator.status().tasks])
"""


def test_a_task_that_a_signal_ends_while_it_joins_leaves_as_stopped(tmp_path: Path) -> None:
    with Spawned("-c", SIGNALLED, cwd=tmp_path, JAX_PLATFORMS="cpu") as spawned:
        left = [(str(index), "stopped") for index in range(3)]
        assert spawned.finish() == (0, f"0 0 0 {left}\n")
