"""`dflow launch --on ray` on a Ray cluster of several nodes, which are all on this machine: tasks of every role, nodes
and whole launches end.

Ray starts slowly, so one cluster and two launches test all. They take a minute of processor time, most of it Ray's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflow.__main__ import main
from dflow.distributed.launching.launch_state import LaunchState
from tests.distributed.counting_script import COUNTERS, REPORT, await_snapshot
from tests.distributed.processes import Spawned, processes, wait_for_end

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed; pip install 'dflow[ray]' brings it"
    ),
]

#: A head, and two nodes for task servers. A node is known by the process id of its raylet; a line with it drains it.
CLUSTER = """
import sys
import time
import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

head = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
address = head.address_info["gcs_address"]
more = dict(gcs_address=address, num_cpus=2, resources={"server": 2.0}, include_log_monitor=False)
nodes = [Node(RayParams(**more), head=False, shutdown_at_exit=True, spawn_reaper=True) for _ in range(2)]

def raylet(node):
    return node.all_processes["raylet"][0].process.pid

print("address", address, raylet(ray._private.worker._global_node), flush=True)
for line in sys.stdin:
    which = [node for node in nodes if raylet(node) == int(line)]
    deadline = int((time.time() + 60) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    print("drained", which[0].get_gcs_client().drain_node(which[0].node_id, reason, "", deadline), flush=True)
"""

#: An evaluator fails. While the file `slow` exists, the worker takes a batch in 10 ms, and at most 1000 in all.
SCRIPT = (
    COUNTERS
    + """
import os
import time

if os.environ["DFLOW_JOB"] == "evaluator":
    raise SystemExit(3)
print("worker", os.getpid(), "of", os.getppid(), flush=True)

def batches():
    for number in range(10**6):
        time.sleep(0.01 if os.path.exists("slow") else 0.0)
        while number >= 1000 and os.path.exists("slow"):
            time.sleep(0.01)
        yield jnp.float32(1.0)

for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=1500):
    pass
"""
    + REPORT
)


#: Without a token of the test the cluster makes one, which a launch does not know. Workers are started when needed.
SETTINGS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_prestart_worker_first_driver": "0"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Spawned]:
    with Spawned("-c", CLUSTER, cwd=tmp_path, **SETTINGS) as started:
        yield started
        assert started.process.stdin is not None
        started.process.stdin.close()
        started.finish()


def words(folder: Path) -> list[str]:
    few = ["--ps-resources", "CPU=0,server=1", "--worker-resources", "CPU=0.25"]
    again = ["--restart", "on-failure", "--restart", "ps=on-failure"]
    kept = ["--snapshots", str(folder / "snapshots"), "--snapshot-every", "0.5"]
    counts = ["--ps", "2", "--workers", "1", "--secret-file", str(folder / "secret")]
    return ["launch", "--all-tables", "--on", "ray", *counts, *few, *again, *kept]


def launch(folder: Path, address: str, *more: str) -> Spawned:
    script = str(folder / "train.py")
    return Spawned("-m", "dflow", *words(folder), *more, script, cwd=folder, RAY_ADDRESS=address, **SETTINGS)


def programs(folder: Path, word: str = "") -> list[int]:
    """Return the ids of the processes of tasks of a launch in the folder, whose command lines have this word."""
    return [
        pid
        for pid, (words, _, _) in processes().items()
        if str(folder) in "".join(words) and word in words and "launch" not in words
    ]


def parent(pid: int) -> int:
    return processes()[pid][1]


def node_of(pid: int) -> int:
    return parent(parent(pid))


def coordinator_on(folder: Path, node: str) -> int:
    """Return the id of the coordinator's process, which is on this node."""
    (found,) = programs(folder, "coordinator")
    assert node_of(found) == int(node)
    return found


def test_all_that_ends_comes_back_and_each_step_is_done_once(
    tmp_path: Path, cluster: Spawned, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "other.py").touch()
    (tmp_path / "slow").touch()
    assert main(["certs", "secret", str(tmp_path / "secret")]) == 0
    _, address, head = cluster.read_until("address")[0].split()
    failing = ("--job", "evaluator=1", "--restart", "evaluator=never", "--logs", "logs")
    with launch(tmp_path, address, *failing) as launched:
        launched.read_until("the first snapshot")
        assert "dflow: on a Ray cluster of 3 nodes with CPU 8, server 4; " in "".join(launched.lines)
        launched.read_until("evaluator:0 ended: exit status 3; 1 of 2 workers go on")
        assert main([*words(tmp_path), str(tmp_path / "train.py")]) == 2
        assert "is used by another launch" in capsys.readouterr().err

        os.kill(coordinator_on(tmp_path, head), signal.SIGKILL)
        launched.read_until("coordinator ended: killed by SIGKILL; it is started again immediately")
        await_snapshot(tmp_path)
        os.kill(parent(coordinator_on(tmp_path, head)), signal.SIGKILL)
        launched.read_until("coordinator ended: killed by SIGKILL; it is started again in 1 s")
        await_snapshot(tmp_path)
        coordinator_on(tmp_path, head)

        (_, pid, _, actor) = launched.read_until("] worker ")[0].removeprefix("[worker:0] ").split()
        assert parent(int(pid)) == int(actor)
        os.kill(int(pid), signal.SIGKILL)
        launched.read_until("worker:0 ended: killed by SIGKILL; it is started again immediately (restart 1 of 3)")
        launched.read_until("] worker ", 2)

        server = programs(tmp_path, "task")[0]
        node = node_of(server)
        assert cluster.process.stdin is not None
        print(node, file=cluster.process.stdin, flush=True)
        launched.read_until("ended: killed by SIGTERM; it is started again immediately")
        await_snapshot(tmp_path)
        assert node not in [node_of(pid) for pid in programs(tmp_path, "task")]

        found = programs(tmp_path)
        assert len(found) == 4
        launched.process.kill()
        wait_for_end(found)
    assert (tmp_path / "logs/worker-0.log").read_text().count("worker ") == 2
    assert main([*words(tmp_path), str(tmp_path / "other.py")]) == 2
    assert "expected the script train.py, whose job has not finished, got other.py" in capsys.readouterr().err

    (tmp_path / "slow").unlink()
    with launch(tmp_path, address) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert not programs(tmp_path)
    assert re.search(r"the job goes on from snapshot \d+, with [1-9]\d* steps done", output), output
    assert "Steps: 1500 of 1500" in output
    for name in ("count", "other"):
        assert re.search(rf"\n {name} +1500 ", output), output
    later = LaunchState(tmp_path / "snapshots", "train.py", {"ps": 2})
    assert "has finished" in later.news
    later.close()
