"""Saving, restoring and exporting variables on tasks: the results of one process, and the work of each task."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task import task_checkpoints
from dflow.distributed.task.checkpoint_messages import (
    CaptureVariables,
    DividedVariable,
    EndCapture,
    EndRestore,
    ReadCapture,
    ReadCheckpoint,
    ReadPiece,
    SavedVariable,
    SaveVariables,
    VariablePart,
)
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.lowering.files.array_files import ArrayFiles, read_arrays
from dflow.lowering.files.object_path import ObjectPath
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice
from tests.distributed.task_parts import handled, part_of, without_server
from tests.lowering.files.written_arrays import write_arrays

X = jnp.ones((2, 3))


@dataclass
class Program:
    """A model, its optimizer, a generator and a counter, some of them on tasks."""

    state: Any
    step: Any

    def values(self) -> dict[str, Any]:
        model = {"w": self.state["w"], "b": self.state["b"], "seen": self.state["seen"]}
        read: dict[str, Any] = jax.tree.map(np.asarray, dflow.read([model, self.state["opt"].slots]))
        return read


def program(cluster: Any) -> Program:
    """Variables on the parameter servers, or in this process if `cluster` is standalone."""
    with cluster.parameter_servers():
        w = dflow.Variable(jnp.arange(6.0).reshape(3, 2), name="w")
        b = dflow.Variable(jnp.zeros(2, jnp.bfloat16), name="b")
        opt = dflow.Optimizer(optax.adam(0.1), [w, b], name="adam")
    noise, seen = dflow.Generator(0, name="noise"), dflow.Variable(0, name="seen")

    @dflow.jit
    def step(x: jax.Array) -> jax.Array:
        seen.assign_add(1)
        moved = x + jax.random.normal(noise.split(), x.shape)
        loss, gradients = dflow.value_and_grad(lambda: jnp.sum((moved @ w + b) ** 2), [w, b])()
        opt.apply(gradients)
        return loss

    return Program({"w": w, "b": b, "opt": opt, "noise": noise, "seen": seen}, step)


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=2) as cluster:
        yield cluster


@pytest.fixture
def worker(memory: MemoryCluster) -> Iterator[Cluster]:
    # The second worker is expected as well.
    with ThreadPoolExecutor(2) as pool:
        joined = list(pool.map(memory.worker, range(2)))
    yield joined[0]
    for one in joined:
        one.close()


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_a_run_goes_on_from_what_was_saved(worker: Cluster, tmp_path: Path) -> None:
    run = program(worker)
    run.step(X)
    dflow.save(tmp_path / "c", run.state)
    saved = run.values()
    losses = [run.step(X) for _ in range(3)]
    report = dflow.restore(tmp_path / "c", run.state)
    assert len(report.restored) == 9
    same(run.values(), saved)
    assert [run.step(X) for _ in range(3)] == losses


def test_the_checkpoint_is_that_of_one_process(worker: Cluster, tmp_path: Path) -> None:
    on_tasks, here = program(worker), program(dflow.connect())
    for run, name in ((on_tasks, "tasks"), (here, "here")):
        dflow.save(tmp_path / name, run.state)
    files = [
        sorted(str(file.relative_to(tmp_path / name)) for file in (tmp_path / name).rglob("*"))
        for name in ("tasks", "here")
    ]
    assert files[0] == files[1]
    for file in files[0]:
        one, other = tmp_path / "tasks" / file, tmp_path / "here" / file
        assert one.is_dir() or file == "dflow.json" or one.read_bytes() == other.read_bytes(), file
    one, other = read_arrays(tmp_path / "tasks"), read_arrays(tmp_path / "here")
    assert (one.types, one.metadata) == (other.types, other.metadata)
    here.step(X)
    dflow.restore(tmp_path / "tasks", here.state)
    same(here.values(), on_tasks.values())


@pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")
def test_what_a_program_makes_twice_by_its_name_is_saved_once(worker: Cluster, tmp_path: Path) -> None:
    """As by a cell of a notebook that is run again: on tasks, a name is one variable."""

    def made() -> Any:
        w, table = dflow.Variable(lambda: jnp.zeros(3), name="w"), dflow.Embedding(6, 2, name="table")
        return [w, table, dflow.Generator(3, name="key"), dflow.Optimizer(optax.adam(0.1), [w], name="adam")]

    with worker.parameter_servers(), dflow.container("twice"):
        first, second = made(), made()
    first[0].assign(jnp.ones(3))
    for place, tree in (("container", "twice"), ("tree", [first, second])):
        dflow.save(tmp_path / place, tree)
        first[0].assign(jnp.zeros(3))
        dflow.restore(tmp_path / place, "twice")
        np.testing.assert_array_equal(second[0].read(), np.ones(3))
    with dflow.container("other"):
        here = [dflow.Variable(jnp.zeros(3), name="w") for _ in range(2)]
    with pytest.raises(dflow.CheckpointError, match="two variables would be the array 'other/w'"):
        dflow.save(tmp_path / "here", "other")
    assert here


def test_no_value_goes_through_the_worker(memory: MemoryCluster, worker: Cluster, tmp_path: Path) -> None:
    with worker.parameter_servers():
        table = dflow.Variable(lambda: jnp.ones((1000, 1000)), name="table")
    served = memory.tasks["ps:0"].server.channel
    before = sum(edge.size_bytes for edge in served.traffic()), sum(edge.size_bytes for edge in worker.traffic())
    dflow.save(tmp_path / "c", {"table": table})
    table.assign(jnp.zeros((1000, 1000)))
    sent = sum(edge.size_bytes for edge in worker.traffic())
    dflow.restore(tmp_path / "c", {"table": table})
    assert sum(edge.size_bytes for edge in served.traffic()) - before[0] < 10_000
    assert sum(edge.size_bytes for edge in worker.traffic()) - sent < 10_000
    assert float(table.read().sum()) == 1e6


def test_a_damaged_array_leaves_every_variable_as_it_was(
    memory: MemoryCluster, worker: Cluster, tmp_path: Path
) -> None:
    run = program(worker)
    dflow.save(tmp_path / "c", run.state)
    run.step(X)
    now = run.values()
    (part,) = (tmp_path / "c" / "w").glob("c*")
    part.write_bytes(b"?" + part.read_bytes()[1:])
    says = r"ps/task:\d: array 'w' \(f32\[3,2\]\) in .*c is damaged.*\n  at .*test_saving_on_a_cluster.py:\d+\n  take"
    with pytest.raises(dflow.CheckpointError, match=says):
        dflow.restore(tmp_path / "c", run.state)
    same(run.values(), now)
    assert not any(part_of(task.server, TaskCheckpoints)._read for task in memory.tasks.values())


def test_an_error_of_a_task_in_a_save_has_the_line_of_the_save(
    worker: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = program(worker)
    monkeypatch.setattr(task_checkpoints, "is_of_an_attempt", lambda name: False)
    says = r"ps:\d writes only into a folder that dflow.save has begun, not .*\n  at .*test_saving_on_a_cluster.py:\d+$"
    with pytest.raises(dflow.CheckpointError, match=says):
        dflow.save(tmp_path / "c", run.state)
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(
    worker: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = program(worker)
    dflow.save(tmp_path / "c", run.state)
    run.step(X)
    newer = run.values()
    looks = iter([True])

    def is_replaced(files: ArrayFiles) -> bool:
        if next(looks, False):
            dflow.save(tmp_path / "c", run.state, overwrite=True)
            run.step(X)
        return read_arrays(files.path).id != files.id

    monkeypatch.setattr(ArrayFiles, "is_replaced", is_replaced)
    dflow.restore(tmp_path / "c", run.state)
    same(run.values(), newer)


def test_an_export_is_loaded_onto_the_tasks(worker: Cluster, tmp_path: Path) -> None:
    v = dflow.Variable(jnp.arange(3.0), name="v")
    dflow.export({"scale": (dflow.jit(lambda x: x * v), 2.0)}).save(tmp_path / "e")
    with worker.parameter_servers():
        there = dflow.load(tmp_path / "e", prefix="served/")
    assert there.variables["v"].device == "/job:ps/task:0"
    same(there.scale(2.0), 2.0 * jnp.arange(3.0))
    there.save(tmp_path / "again")
    same(read_arrays(tmp_path / "again" / "variables").read({"v": None})["v"], jnp.arange(3.0))


def saving(folder: Path | str, place: str = "w") -> SaveVariables:
    return SaveVariables("/job:worker/task:0", 7, str(folder), (SavedVariable("w", "w", place),))


@pytest.fixture
def checkpoints() -> TaskCheckpoints:
    store = Store()
    store.create("w", ArrayType(jnp.dtype(jnp.float32), (3,)), lambda: jnp.ones(3))
    return without_server(TaskCheckpoints, "/job:worker/task:9".__eq__, name="/job:ps/task:0", store=store)


BEGUN = ".c.0123456789abcdef.writing"


@pytest.mark.parametrize(
    ("folder", "place"), [("c", "w"), (BEGUN, "../w"), (BEGUN, "/etc/w"), (BEGUN, "a/../../w"), (BEGUN, "")]
)
def test_a_task_writes_nowhere_but_in_a_save(
    checkpoints: TaskCheckpoints, tmp_path: Path, folder: str, place: str
) -> None:
    (tmp_path / folder).mkdir()
    with pytest.raises(dflow.CheckpointError, match=r"writes only into a folder that dflow\.save has begun"):
        handled(checkpoints, saving(tmp_path / folder, place))
    with pytest.raises(dflow.CheckpointError, match="writes only into"):
        handled(checkpoints, saving(Path(folder), place))
    assert not any((tmp_path / folder).iterdir())


@pytest.mark.parametrize(("folder", "place"), [("c", "w"), ("~0123456789abcdef/c", "w"), ("~0123456789abcdef", "../w")])
def test_a_task_writes_nowhere_in_a_store_but_in_a_save(checkpoints: TaskCheckpoints, folder: str, place: str) -> None:
    url = f"memory://{secrets.token_hex(4)}"
    with pytest.raises(dflow.CheckpointError, match=r"writes only into a folder that dflow\.save has begun"):
        handled(checkpoints, saving(f"{url}/{folder}", place))
    with pytest.raises(dflow.CheckpointError, match="expected a path of this machine, or a URL of"):
        handled(checkpoints, saving(f"http://host/{folder}", place))
    with pytest.raises(dflow.CheckpointError, match=f"ps:0 sees no folder {url}, or not what was begun in it"):
        handled(checkpoints, saving(f"{url}/~0123456789abcdef"))
    assert ObjectPath(url).names() == []


def test_a_task_that_sees_other_files_says_so(checkpoints: TaskCheckpoints, tmp_path: Path) -> None:
    with pytest.raises(dflow.CheckpointError, match=r"ps:0 sees no folder(.|\n)*save where all tasks of the cluster"):
        handled(checkpoints, saving(tmp_path / BEGUN))
    write_arrays(tmp_path / "c", {"w": np.zeros(3, np.float32)})
    with pytest.raises(dflow.CheckpointError, match=r"ps:0 finds another checkpoint at (.|\n)*save where all tasks"):
        handled(checkpoints, ReadCheckpoint("/job:worker/task:0", 1, str(tmp_path / "c"), "of another", {"w": "w"}))


def test_a_task_writes_the_values_that_it_captured_until_the_capture_ends(
    checkpoints: TaskCheckpoints, tmp_path: Path
) -> None:
    handled(checkpoints, CaptureVariables("/job:worker/task:0", 7, ("w",)))
    checkpoints._task.store.update("w", "assign_add", jnp.ones(3))
    for folder in (BEGUN, BEGUN.replace("0", "1")):
        (tmp_path / folder).mkdir()
    handled(checkpoints, saving(tmp_path / BEGUN))
    assert [file.read_bytes()[:12] for file in (tmp_path / BEGUN / "w").glob("c*")] == [np.ones(3, "f4").tobytes()]
    handled(checkpoints, EndCapture("/job:worker/task:0", 7))
    with pytest.raises(dflow.TaskLost, match="ps:0 has not captured what worker:0 saves"):
        handled(checkpoints, saving(tmp_path / BEGUN.replace("0", "1")))


@pytest.mark.parametrize("kind", ["save", "piece", "divided", "shared", "restore"])
def test_a_name_that_a_request_has_and_the_task_has_not_is_named(
    checkpoints: TaskCheckpoints, tmp_path: Path, kind: str
) -> None:
    worker, folder = "/job:worker/task:0", tmp_path / BEGUN
    folder.mkdir()
    write_arrays(tmp_path / "c", {"w": np.zeros(3, np.float32)})
    handled(checkpoints, CaptureVariables(worker, 7, ("w",)))
    handled(checkpoints, CaptureVariables(worker, 8, ("w",)))
    handled(checkpoints, EndCapture(worker, 8, "shared"))
    part = VariablePart("/job:ps/task:1", "w", AxisSlice(0, 0, 3))
    message: Any = {
        "save": SaveVariables(worker, 7, str(folder), (SavedVariable("v", "v", "v"),)),
        "piece": ReadPiece(worker, 7, "v", ((0, 1),)),
        "divided": SaveVariables(worker, 7, str(folder), (), (DividedVariable("v", "v", (3,), (part,)),)),
        "shared": ReadCapture(worker, "shared", ("v",)),
        "restore": ReadCheckpoint(worker, 1, str(tmp_path / "c"), read_arrays(tmp_path / "c").id, {"v": "w"}),
    }[kind]
    with pytest.raises(WireError, match=r"expected (one of w|a part on ps:0), got ('v'|parts on ps:1)"):
        handled(checkpoints, message)


def test_what_a_worker_that_has_left_captured_or_read_is_freed(checkpoints: TaskCheckpoints, tmp_path: Path) -> None:
    write_arrays(tmp_path / "c", {"w": np.zeros(3, np.float32)})
    id = read_arrays(tmp_path / "c").id
    for worker in ("/job:worker/task:0", "/job:worker/task:9"):
        handled(checkpoints, CaptureVariables(worker, 1, ("w",)))
        handled(checkpoints, ReadCheckpoint(worker, 1, str(tmp_path / "c"), id, {"w": "w"}))
    assert [*checkpoints._captured] == [*checkpoints._read] == [("/job:worker/task:0", 1)]
    checkpoints.left("/job:worker/task:0")
    assert not checkpoints._captured
    assert not checkpoints._read


def test_a_save_frees_what_the_tasks_captured(memory: MemoryCluster, worker: Cluster, tmp_path: Path) -> None:
    dflow.save(tmp_path / "c", program(worker).state)
    assert not any(part_of(task.server, TaskCheckpoints)._captured for task in memory.tasks.values())


def test_a_restore_that_ends_while_its_values_are_read_keeps_none(
    checkpoints: TaskCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path / "c", {"w": np.zeros(3, np.float32)})
    read = Store.read_saved

    def read_late(*args: Any) -> Any:
        values = read(*args)
        handled(checkpoints, EndRestore("/job:worker/task:0", 1, is_set=False))  # from a worker that no longer waits
        return values

    monkeypatch.setattr(Store, "read_saved", read_late)
    id = read_arrays(tmp_path / "c").id
    handled(checkpoints, ReadCheckpoint("/job:worker/task:0", 1, str(tmp_path / "c"), id, {"w": "w"}))
    assert not checkpoints._read
