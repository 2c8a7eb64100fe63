"""A cluster of real processes over TCP, started by the launcher; one worker is killed."""

from __future__ import annotations

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.lowering.files.array_files import read_arrays
from tests.distributed.counting_script import COUNTERS, REPORT
from tests.distributed.processes import Spawned

#: Worker 1 dies after its fifth step. Worker 0 continues beyond its fifth step only when it knows, so it cannot end
#: first.
TRAIN = (
    COUNTERS
    + """
import os, signal, threading
dead = threading.Event()

def note(roster):
    if any(info.left for info in roster.tasks if info.task == "/job:worker/task:1"):
        dead.set()

cluster.coordinator.session.call_on_roster(note)

def batches():
    for number in range(1000):
        if number == 5 and cluster.index == 1:
            os.kill(os.getpid(), signal.SIGNAL)
        if number == 5:
            assert dead.wait(60)
        yield jnp.float32(1.0)

for metrics in dflow.distributed.Async(cluster).run(step, batches(), steps=200):
    pass
"""
    + REPORT
)


@pytest.mark.parametrize("signal", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_a_killed_worker_leaves_its_steps_to_the_others(tmp_path: Path, signal: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN.replace("signal.SIGNAL", f"signal.{signal}"))
    with Spawned(
        "-m", "dflow", "launch", "--all-tables", "--ps", "2", "--workers", "2", "train.py", cwd=tmp_path
    ) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "Steps: 200 of 200" in output
    assert f"worker:1 ended: killed by {signal}; 1 of 2 workers go on" in output
    assert re.search(rf"\n worker:1 +\d+\.\d s +\d+\.\d s +killed by {signal} \(", output), output
    for task in ("ps:0", "ps:1", "worker:0"):
        assert re.search(rf"\n {task} +\d+\.\d s +\d+\.\d s .* finished", output), output
    # After SIGKILL five steps are applied and not reported, so they are tried again, and no task applies them twice.
    assert re.search(r"\n count +200 ", output), output
    assert re.search(r"\n other +200 ", output), output


#: Worker 1 dies when the others have begun the sixth round, which it has not begun.
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


@pytest.mark.long
def test_the_rounds_go_on_without_a_worker_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN_IN_ROUNDS)
    with Spawned(
        "-m", "dflow", "launch", "--all-tables", "--ps", "2", "--workers", "3", "train.py", cwd=tmp_path
    ) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "Steps: 20 of 20" in output
    assert "worker:1 ended: killed by SIGKILL; 2 of 3 workers go on" in output
    assert re.search(r"\n worker:0 +20 +\d", output), output
    assert re.search(r"\n first +20 ", output), output
    assert re.search(r"\n second +20 ", output), output


#: Worker 0 kills ps:0 at its fifth step; no step is done until ps:0 has restarted empty.
TRAIN_WITHOUT_PS = """
import os, signal, threading
from pathlib import Path
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    a = dflow.Variable(lambda: jnp.zeros(64), name="a")
    b = dflow.Variable(lambda: jnp.zeros(64), name="b")
assert (a.device, b.device) == ("/job:ps/task:0", "/job:ps/task:1")

@dflow.jit
def step(x):
    a.assign_add(x * jnp.ones(64))
    b.assign_add(x * jnp.ones(64))

again = threading.Event()

def note(roster):
    if len([info for info in roster.tasks if info.task == "/job:ps/task:0"]) == 2:
        again.set()

cluster.coordinator.session.call_on_roster(note)

def batches():
    for number in range(1000):
        if number == 5 and cluster.index == 0 and not Path("killed").exists():
            Path("killed").touch()
            siblings = open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split()
            words = {pid: open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1)) for pid in siblings}
            [ps] = [pid for pid in siblings if words[pid][-4:-1] == [b"ps", b"--index", b"0"]]
            os.kill(int(ps), signal.SIGKILL)
        if number == 5:
            assert again.wait(60)
        yield jnp.float32(1.0)

for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=300):
    pass
cluster.report("a", float(a[0]))
cluster.report("b", float(b[0]))
cluster.close()
"""


@pytest.mark.once
def test_a_run_whose_variables_were_lost_with_a_ps_task_fails_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN_WITHOUT_PS)
    options = ("--ps", "2", "--workers", "2", "--restart", "on-failure:1", "--restart", "ps=on-failure")
    with Spawned("-m", "dflow", "launch", "--all-tables", *options, "train.py", cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 1, output
    assert "ps:0 ended: killed by SIGKILL; it is started again" in output
    lost = r"ps:0 left at \d+\.\d s: .*, and ps:0 has been started again without it"
    # The first process of worker:0 used the variable; the second processes of both workers ask for its location.
    assert re.search(rf"\[worker:0\] .*TaskLost: 'a' is lost: {lost}", output), output
    for worker in ("worker:0", "worker:1"):
        assert re.search(rf"\[{worker}\] .*TaskLost: variable 'a' is lost: {lost}", output), output
    assert not re.search(r"\n b +\d", output), output


#: Run twice: the second run restores the checkpoint of the first.
TRAIN_AND_SAVE = """
import os
import jax.numpy as jnp, optax
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    w = dflow.Variable(lambda: jnp.arange(3.0), name="w")
    b = dflow.Variable(lambda: jnp.zeros(()), name="b")
    opt = dflow.Optimizer(optax.adam(0.1), [w, b], name="adam")
    table = dflow.ShardedVariable(lambda: jnp.arange(5), shards=2, by="modulo", name="table")

@dflow.jit
def step():
    table.scatter_add(jnp.arange(5), jnp.ones(5, int))
    opt.apply(dflow.grad(lambda: ((w - 1) ** 2).sum() + (b - 2) ** 2, [w, b])())

state = {"w": w, "b": b, "opt": opt, "table": table}
if os.path.exists("saved"):
    dflow.restore("saved", state)
for _ in range(5):
    step()
dflow.save("saved", state, overwrite=True)
cluster.report("sum", float(w.read().sum() + b.read()))
cluster.close()
"""


@pytest.mark.once
def test_a_cluster_goes_on_from_what_an_earlier_one_saved(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN_AND_SAVE)
    for _ in range(2):
        with Spawned(
            "-m", "dflow", "launch", "--all-tables", "--ps", "2", "--workers", "1", "train.py", cwd=tmp_path
        ) as launched:
            status, output = launched.finish()
        assert status == 0, output
    w, b = dflow.Variable(jnp.arange(3.0)), dflow.Variable(0.0)
    opt = dflow.Optimizer(optax.adam(0.1), [w, b])
    for _ in range(10):
        opt.apply(dflow.grad(lambda: ((w - 1) ** 2).sum() + (b - 2) ** 2, [w, b])())
    there = read_arrays(tmp_path / "saved").read({"w": None, "b": None, "table": None})
    np.testing.assert_allclose(there["w"], w.read(), rtol=1e-6)
    np.testing.assert_allclose(there["b"], b.read(), rtol=1e-6)
    np.testing.assert_array_equal(there["table"], np.arange(5) + 10)
