"""A dflow cluster of processes of this machine, without its workers; and one of another runtime."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.startup import free_port, running
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import GetStatus

START_S = 60.0
#: Environment variables for one computing thread in each process. XLA makes `NPROC` threads.
ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Tasks:
    """The address of the coordinator, and the process ids of the ps tasks and of the coordinator."""

    coordinator: str
    ps: list[int]
    coordinator_pid: int

    def worker(self, index: int) -> dict[str, str]:
        """Return the environment of a worker."""
        return standalone() | {
            "DFLOW_COORDINATOR": self.coordinator,
            "DFLOW_JOB": "worker",
            "DFLOW_INDEX": str(index),
        }


def standalone() -> dict[str, str]:
    """Return an environment without a cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}


@contextlib.contextmanager
def running_tasks(ps: int, workers: int, **environment: str) -> Iterator[Tasks]:
    """Start a coordinator and ps tasks of a cluster with this many workers; wait until they have joined."""
    coordinator = f"127.0.0.1:{free_port()}"
    jobs = ["--job", f"ps={ps}", "--job", f"worker={workers}"]
    tasks = [["task", "--job", "ps", "--index", str(index), "--coordinator", coordinator] for index in range(ps)]
    with contextlib.ExitStack() as stack:
        first, *others = [
            stack.enter_context(running([sys.executable, "-m", "dflow", *words], standalone() | environment)).pid
            for words in (["coordinator", *jobs, "--address", coordinator], *tasks)
        ]
        wait_for_tasks(coordinator, ps)
        yield Tasks(coordinator, others, first)


def wait_for_tasks(coordinator: str, count: int) -> None:
    """Wait until this many tasks have joined."""
    client = CoordinatorClient(SocketTransport(), coordinator, name="benchmark", timeout_s=START_S)
    deadline = time.monotonic() + START_S
    with contextlib.closing(client):
        while (joined := len(client.ask(GetStatus(), START_S).tasks)) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{joined} of {count} tasks have joined after {START_S:g} s")
            time.sleep(0.1)


@contextlib.contextmanager
def running_peers(command: Sequence[str], ps: int, workers: int) -> Iterator[tuple[list[int], list[list[str]]]]:
    """Start the ps tasks of another runtime; yield their process ids, and the command of each worker.

    A ps task prints a line when it is up.
    """
    addresses = [f"localhost:{free_port()}" for _ in range(ps + workers)]
    spec = ["--ps", *addresses[:ps], "--workers", *addresses[ps:]]
    with contextlib.ExitStack() as stack:
        tasks = [
            stack.enter_context(running([*command, "--job", "ps", "--index", str(index), *spec])) for index in range(ps)
        ]
        for task in tasks:
            assert task.stdout is not None
            task.stdout.readline()
        words = [[*command, "--job", "worker", "--index", str(index), *spec] for index in range(workers)]
        yield [task.pid for task in tasks], words
