"""A cluster of real processes over TCP, started by the launcher, of which one worker is killed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed.processes import Spawned

#: Worker 1 dies after its fifth step. The others go on beyond their fifth when they know, so that none can end first.
TRAIN = """
import os, signal, threading
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    count = dflow.Variable(lambda: jnp.zeros(()), name="count")
    other = dflow.Variable(lambda: jnp.zeros(64), name="other")

@dflow.jit
def step(x):
    count.assign_add(x)
    other.assign_add(x * jnp.ones(64))
    return {"loss": other.read().sum()}

dead = threading.Event()

def note(roster):
    if any(info.left for info in roster.tasks if info.task == "/job:worker/task:1"):
        dead.set()

cluster._client.call_on_roster(note)

def batches():
    for number in range(1000):
        if number == 5 and cluster.index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5:
            assert dead.wait(60)
        yield jnp.float32(1.0)

for metrics in dflow.distributed.Async(cluster).run(step, batches(), steps=200):
    pass
if cluster.elect("report"):
    cluster.report("count", float(count))
    cluster.report("other", float(other[63]))
cluster.close()
"""


def test_a_killed_worker_leaves_its_steps_to_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with Spawned("-m", "dflow", "launch", "--ps", "2", "--workers", "3", "train.py", cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "Steps: 200 of 200" in output
    assert "worker:1 ended: killed by SIGKILL; 2 of 3 workers go on" in output
    assert re.search(r"\n worker:1 +\d+\.\d s +\d+\.\d s +killed by SIGKILL \(", output), output
    for task in ("ps:0", "ps:1", "worker:0", "worker:2"):
        assert re.search(rf"\n {task} +\d+\.\d s +\d+\.\d s +finished", output), output
    # Five steps were applied but not reported, so they were done again.
    assert re.search(r"\n count +205 ", output), output
    assert re.search(r"\n other +205 ", output), output


#: Worker 1 dies when the others have begun the sixth round, which it has not.
TRAIN_IN_ROUNDS = """
import os, signal
import jax.numpy as jnp, optax
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    first = dflow.Variable(lambda: jnp.zeros(8), name="first")
    second = dflow.Variable(lambda: jnp.zeros(8), name="second")
    waiting = dflow.FIFOQueue(8, jnp.float32(0), name="waiting")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [first, second], name="sgd")

@dflow.jit
def step(x):
    seen = first.read()[0], second.read()[0]
    optimizer.apply([(0 * seen[0] - x) * jnp.ones(8)] * 2)
    return {"first": seen[0], "second": seen[1]}

def batches():
    for number in range(1000):
        if number == 5 and cluster.index == 1:
            waiting.dequeue_many(2)
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 5:
            waiting.enqueue(1.0)
        yield jnp.float32(1.0)

seen = [float(metrics["first"]) for metrics in dflow.distributed.Sync(cluster).run(step, batches(), steps=20)]
assert seen == list(map(float, range(20))), seen
if cluster.elect("report"):
    cluster.report("first", float(first[0]))
    cluster.report("second", float(second[7]))
cluster.close()
"""


def test_the_rounds_go_on_without_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN_IN_ROUNDS)
    with Spawned("-m", "dflow", "launch", "--ps", "2", "--workers", "3", "train.py", cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "Steps: 20 of 20" in output
    assert "worker:1 ended: killed by SIGKILL; 2 of 3 workers go on" in output
    assert re.search(r"\n worker:0 +20 +\d", output), output
    assert re.search(r"\n first +20 ", output), output
    assert re.search(r"\n second +20 ", output), output
