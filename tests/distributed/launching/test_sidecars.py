"""Workers started by a scheduler: the first also runs the coordinator, and one on each host a task server.

The scheduler here is the test, which gives each process the variables of srun.
"""

from __future__ import annotations

import os
import socket
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.distributed.detection.recorded import slurm
from tests.distributed.launching.test_launcher import children_of
from tests.distributed.processes import Spawned, wait_for_end

TRAIN = """
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
print("task", cluster.task, sorted(cluster.tasks))
with cluster.parameter_servers():
    count = dflow.Variable(lambda: jnp.zeros(()), name="count")

@dflow.jit
def step():
    count.assign_add(1.0)

step()
if cluster.index == 1:
    print("waits")
    open("go").read()
    step()
    print("count", float(count))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def step_of_two(
    tmp_path: Path,
    script: str,
    started: ExitStack,
    nodes: str = "127.0.0.1",
    ranks: Sequence[int] = (0, 1),
    count: int = 1,
    **more: str,
) -> list[Spawned]:
    """Start two workers on `count` nodes; each node has a task server."""
    (tmp_path / "train.py").write_text(script)
    os.mkfifo(tmp_path / "go")
    port = str(free_port())
    return [
        started.enter_context(
            Spawned(
                "train.py",
                cwd=tmp_path,
                **slurm(number, nodes=nodes, per_node=2 // count, nodes_count=count),
                DFLOW_PORT=port,
                **more,
            )
        )
        for number in ranks
    ]


def test_what_the_first_worker_runs_stays_for_the_others_and_ends_with_the_last(tmp_path: Path) -> None:
    with ExitStack() as started:
        # With garbage collection at exit, as in a user's process. Each worker has sidecars for the other one.
        first, second = step_of_two(tmp_path, TRAIN, started, nodes="127.0.0.[1-2]", count=2, PYTHONPATH="")
        first.read_until("coordinator and ps:0 stay up for worker:1")
        children = children_of(first.process.pid)
        assert len(children) == 2
        second.read_until("waits")
        (tmp_path / "go").write_text("")
        status, output = second.finish()
        assert status == 0, output
        assert output.endswith("count 3.0\n")
        status, output = first.finish()
        assert status == 0, output
        wait_for_end(children)


@pytest.mark.once
def test_the_death_of_a_child_is_said_by_whoever_started_it(tmp_path: Path) -> None:
    script = """
    import os, signal, threading
    import dflow

    cluster = dflow.connect()
    if cluster.index == 0:
        own = open(f"/proc/self/task/{os.getpid()}/children").read().split()
        [ps] = [pid for pid in own if b"task" in open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1))]
        os.kill(int(ps), signal.SIGKILL)
        threading.Event().wait()
    """
    with ExitStack() as started:
        [first] = step_of_two(tmp_path, textwrap.dedent(script), started, ranks=[0])
        [line] = first.read_until("which this process started")
        assert line == (
            "dflow: ps:0, which this process started, has ended (killed by SIGKILL); processes that need it will fail\n"
        )
