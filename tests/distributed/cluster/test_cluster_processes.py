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
from tests.distributed.processes import Spawned

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
