"""Sharded variables in checkpoints: each is one array, saved by any number of shards and restored onto any other."""

from __future__ import annotations

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task import task_checkpoints
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.lowering.files import divided_array
from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.files.divided_array import DividedArray
from dflow.tables.shard_layout import DIVISIONS, ShardLayout
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.ir.types import ArrayType
from dflow.training import named_arrays
from tests.distributed.task_parts import part_of
from tests.effort import examples
from tests.lowering.files.written_arrays import write_arrays

pytestmark = pytest.mark.once

SHAPE = (23, 5)
#: The optimizers, and the arrays of their slots.
OPTIMIZERS: dict[str, Any] = {"adagrad": optax.adagrad, "adam": optax.adam}
SLOTS = {"adagrad": ["sum_of_squares/table"], "adam": ["mu/table", "nu/table"]}

#: Numbers of containers, so that programs share no variables.
_numbers = itertools.count()


class Division(NamedTuple):
    """A table's division over shards, by one of `DIVISIONS` or by traffic; 0 shards are one variable."""

    shards: int
    by: str = "rows"


class Program:
    """A table with an optimizer, in a new container, whose name is left out of the arrays' names."""

    def __init__(self, cluster: Any, division: Division, rule: str = "adam", shape: tuple[int, ...] = SHAPE) -> None:
        self._container = f"n{next(_numbers)}"
        options: Any = {"shards": division.shards} if division.shards else {}
        if division.shards:
            uneven = division.by == "traffic"
            options |= {"traffic": 1 / np.arange(1, shape[0] + 1)} if uneven else {"by": division.by}
        kind: Any = dflow.ShardedVariable if division.shards else dflow.Variable
        with cluster.parameter_servers(), dflow.container(self._container):
            self.table = kind(lambda: jnp.zeros(shape), name="table", **options)
            self.opt = dflow.Optimizer(OPTIMIZERS[rule](0.1), [self.table], name="opt")
        self.state = {"table": self.table, "opt": self.opt}

    def step(self) -> Any:
        def loss() -> Any:
            rows = self.table.gather(jnp.array([3, 3, 22, 0]))
            return ((rows - jnp.arange(5.0)) ** 2).sum()

        @dflow.jit
        def step() -> Any:
            value, gradients = dflow.value_and_grad(loss, [self.table])()
            self.opt.apply(gradients)
            return value

        return step()

    def name(self, name: str) -> str:
        return name.removeprefix(f"{self._container}/")

    def save(self, path: Path | str) -> None:
        dflow.save(path, self.state, names=self.name)

    def restore(self, path: Path | str, **options: Any) -> dflow.RestoreReport:
        return dflow.restore(path, self.state, names=self.name, **options)


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def worker(memory: MemoryCluster) -> Iterator[Cluster]:
    with closing(memory.worker()) as cluster:
        yield cluster


def arrays_in(path: Path | str) -> dict[str, Any]:
    files = read_arrays(path)
    return files.read(dict.fromkeys(files.types))


def same(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def random_arrays(rule: str) -> dict[str, Any]:
    """The arrays of a program that has taken some steps."""
    drawn = np.random.default_rng(0)
    names = ["table", *(f"opt/0/{slot}" for slot in SLOTS[rule])]
    found: dict[str, Any] = {name: drawn.random(SHAPE, np.float32) for name in names}
    return found | ({"opt/0/count": np.int32(7)} if rule == "adam" else {})


divisions = st.builds(Division, st.integers(0, 5), st.sampled_from([*DIVISIONS, "traffic"]))


@settings(max_examples=examples(25), deadline=None)
@given(
    one=divisions,
    other=divisions,
    on_tasks=st.tuples(st.booleans(), st.booleans()),
    rule=st.sampled_from([*OPTIMIZERS]),
    chunk_bytes=st.sampled_from([16, 100, 1 << 20]),
)
def test_shards_are_restored_onto_other_shards(
    one: Division,
    other: Division,
    on_tasks: tuple[bool, bool],
    rule: str,
    chunk_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
    worker: Cluster,
) -> None:
    """Arrays go through two programs, each with its own division, and are the same after each."""
    folder, expected = tmp_path_factory.mktemp("saves"), random_arrays(rule)
    write_arrays(folder / "0", expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divided_array, "_CHUNK_BYTES", chunk_bytes)
        for number, division in enumerate((one, other)):
            program = Program(worker if on_tasks[number] else dflow.connect(), division, rule)
            assert set(program.restore(folder / f"{number}").restored) == expected.keys()
            same(program.table.read(), expected["table"])
            program.save(folder / f"{number + 1}")
            same(arrays_in(folder / f"{number + 1}"), expected)


@pytest.mark.parametrize("by", DIVISIONS)
def test_each_chunk_is_written_by_one_task(
    memory: MemoryCluster, worker: Cluster, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks share the chunks of a table; of even divisions by rows and columns no element leaves its task."""
    wrote = Counter[tuple[Any, ...]]()
    chunk = DividedArray._chunk

    def counted(array: DividedArray, bounds: Any) -> Any:
        wrote[bounds] += 1
        return chunk(array, bounds)

    monkeypatch.setattr(DividedArray, "_chunk", counted)
    monkeypatch.setattr(divided_array, "_CHUNK_BYTES", 40 * 64 * 4)
    asked = []
    encode_arrays = task_checkpoints.encode_arrays

    def noted(pieces: Any) -> Any:
        asked.append(pieces)
        return encode_arrays(pieces)

    monkeypatch.setattr(task_checkpoints, "encode_arrays", noted)  # for pieces that another task asks for
    with worker.parameter_servers():
        table = dflow.ShardedVariable(lambda: jnp.ones((320, 64)), shards=2, by=by, name=f"shared {by}")
    sent = sum(edge.size_bytes for edge in worker.traffic())
    dflow.save(tmp_path / "c", {"table": table})
    dflow.restore(tmp_path / "c", {"table": table})
    assert sum(edge.size_bytes for edge in worker.traffic()) == sent
    assert set(wrote.values()) == {1}
    assert len(wrote) == len([*(tmp_path / "c").rglob("c.*")]) == 8
    assert len(asked) == (8 if by == "modulo" else 0)
    assert table.read().sum() == 320 * 64


@pytest.mark.parametrize("cuts", [(), (1000, 9000, 10_000)])
def test_few_rows_travel_of_an_uneven_division(cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_bytes = 1 << 14 if cuts else 1 << 16
    monkeypatch.setattr(divided_array, "_CHUNK_BYTES", chunk_bytes)
    layout, type = ShardLayout((10_000, 16), 3, cuts=cuts), ArrayType(jnp.dtype("float32"), (10_000, 16))
    rows = Counter[bool]()

    def piece(here: int, number: int, bounds: Any) -> Any:
        sizes = [end - first for first, end in bounds]
        rows[number == here] += sizes[0]
        return np.empty(sizes, np.float32)

    for here in range(3):
        array = DividedArray(type, [layout.part(number) for number in range(3)], [here], partial(piece, here))
        assert all(data.nbytes <= chunk_bytes for _, data in array.pieces())
    assert rows[True] + rows[False] == 10_000
    assert rows[False] <= (chunk_bytes // 64 if cuts else 10)


def test_a_table_is_saved_to_a_store_and_as_one_file(worker: Cluster, tmp_path: Path) -> None:
    program, expected = Program(worker, Division(3, "columns")), random_arrays("adam")
    write_arrays(tmp_path / "0", expected)
    program.restore(tmp_path / "0")
    for path in (f"memory://{secrets.token_hex(4)}/c", tmp_path / "c.safetensors", tmp_path / "c.orbax"):
        program.save(path)
        for other in (Division(2, "modulo"), Division(0)):
            restored = Program(worker, other)
            assert len(restored.restore(path).restored) == 4
            same(restored.table.read(), expected["table"])


def test_names_of_shards_are_those_of_the_whole(tmp_path: Path) -> None:
    """Without names of their own, a table and its slots are called by their paths; in a container, by their names."""
    table = dflow.ShardedVariable(jnp.ones(SHAPE), shards=2)
    opt = dflow.Optimizer(optax.adagrad(0.1), {"words": table})
    dflow.save(tmp_path / "paths", {"model": {"words": table}, "opt": opt})
    assert read_arrays(tmp_path / "paths").types.keys() == {"model/words", "opt/0/sum_of_squares/words"}
    with dflow.container("held"):
        named = dflow.ShardedVariable(jnp.ones(SHAPE), shards=2, name="table")
        _slots = dflow.Optimizer(optax.adagrad(0.1), [named], name="opt")
    dflow.save(tmp_path / "held", "held")
    assert read_arrays(tmp_path / "held").types.keys() == {"held/table", "held/opt/0/sum_of_squares/table"}


def test_a_slot_of_another_shape_is_of_its_shard(tmp_path: Path) -> None:
    """Adafactor's rows and columns of statistics are of each shard; a restore onto as many shards has them all."""
    with dflow.container("factored"):
        table = dflow.ShardedVariable(jnp.ones((6, 4)), shards=2, name="table")
        with pytest.warns(dflow.ShardedUpdateWarning):
            opt = dflow.Optimizer(optax.adafactor(0.1, min_dim_size_to_factor=2), [table], name="opt")
    dflow.save(tmp_path / "c", [table, opt])
    types = {name.removeprefix("factored/"): str(type) for name, type in read_arrays(tmp_path / "c").types.items()}
    rows = {f"opt/0/v_row/table/{number}": "f32[3]" for number in range(2)}
    assert types.items() >= {"table": "f32[6,4]", **rows}.items()
    assert dflow.restore(tmp_path / "c", [table, opt]).restored


def test_differences_are_of_the_whole_array(worker: Cluster, tmp_path: Path) -> None:
    one, other = Program(worker, Division(2)), Program(worker, Division(3, "modulo"), shape=(20, 5))
    one.save(tmp_path / "c")
    with pytest.raises(dflow.CheckpointError, match=r"changed │ table +│ f32\[23,5\] +│ f32\[20,5\]"):
        other.restore(tmp_path / "c")
    for chunk in (tmp_path / "c" / "table").glob("c.1.*"):
        chunk.write_bytes(b"?" + chunk.read_bytes()[1:])
    one.table.assign(jnp.full(SHAPE, 3.0))
    with pytest.raises(dflow.DamagedCheckpoint, match=r"array 'table' \(f32\[23,5\]\) in .*c is damaged"):
        one.restore(tmp_path / "c")
    assert (one.table.read() == 3.0).all()


def test_a_save_of_some_shards_is_refused(tmp_path: Path) -> None:
    table = dflow.ShardedVariable(jnp.ones(SHAPE), shards=3, name="table")
    with pytest.raises(
        dflow.CheckpointError,
        match=r"array 'table': expected .* part of f32\[23,5\] once, got table/1, table/2\n.*\n  give the sharded",
    ):
        dflow.save(tmp_path / "c", table.shards[1:])
    other = dflow.Variable(jnp.ones(SHAPE), name="other")
    with pytest.raises(dflow.CheckpointError, match="two variables would be the array 'table'"):
        dflow.save(tmp_path / "c", [table, other], names={"other": "table"})
    assert not (tmp_path / "c").exists()


def test_shards_on_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = dflow.ShardedVariable(jnp.ones(SHAPE), shards=2, name="spread")
    monkeypatch.setattr(named_arrays, "is_divided", lambda variable: variable.name == "spread/1")
    with pytest.raises(dflow.CheckpointError, match=r"array 'spread': .* got parts of 'spread/1'"):
        dflow.save(tmp_path / "c", table)


def test_a_task_that_ends_in_a_save_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_cluster(ps=2, workers=1) as memory, closing(memory.worker()) as worker:
        program = Program(worker, Division(2, "modulo"))
        with dflow.CheckpointManager(tmp_path / "run", program.state, every=1, names=program.name) as manager:
            program.step()
            manager.save(0)
            manager.wait()
            saved = arrays_in(manager.checkpoints[-1].path)
            program.step()
            lost = memory.tasks["ps:1"]

            def ends(*args: Any) -> Any:
                lost.close()
                raise dflow.TaskLost("it has ended")

            monkeypatch.setattr(part_of(lost.server, TaskCheckpoints), "_piece", ends)
            manager.save(1)
            with pytest.raises(dflow.CheckpointError, match="expected to be saved, got"):
                manager.wait()
            assert [checkpoint.step for checkpoint in manager.checkpoints] == [0]
        same(arrays_in(tmp_path / "run" / "step_0"), saved)


def test_an_export_has_one_array(worker: Cluster, tmp_path: Path) -> None:
    program, expected = Program(worker, Division(3, "modulo")), random_arrays("adam")
    write_arrays(tmp_path / "0", expected)
    program.restore(tmp_path / "0")
    one_shard = program.table.shards[0]

    @dflow.jit
    def move(ids: Any) -> Any:
        program.table.scatter_add(ids, jnp.ones((2, 5)))
        return program.table.gather(ids)

    ids = jnp.array([1, 22])
    dflow.export({"move": (move, ids), "shard": (dflow.jit(one_shard.read),)}).save(tmp_path / "e")
    name = program.table.name
    same(arrays_in(tmp_path / "e" / "variables"), {name: expected["table"]})
    there = dflow.load(tmp_path / "e", prefix="loaded/")
    same(there.move(ids), move(ids))
    there.save(tmp_path / "again")
    same(arrays_in(tmp_path / "again" / "variables"), {name: program.table.read()})
    dflow.save(tmp_path / "c", there.variables, names={f"loaded/{name}": "table"})
    same(arrays_in(tmp_path / "c"), {"table": program.table.read()})
    dflow.export(dflow.jit(one_shard.read)).save(tmp_path / "shard")
    assert arrays_in(tmp_path / "shard" / "variables").keys() == {f"{name}/0"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1}, "not each part once"),
        ({"step": 0}, "not each part once"),
        ({"axis": 1}, "do not agree on it"),
        ({"shape": [23]}, "do not agree on it"),
    ],
)
def test_a_damaged_manifest_of_an_export_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    table = dflow.ShardedVariable(jnp.ones(SHAPE), shards=2, name="exported")
    dflow.export(dflow.jit(table.sum)).save(tmp_path / "e")
    file = tmp_path / "e" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["variables"]["exported/0"]["part"] |= change
    file.write_text(json.dumps(manifest))
    with pytest.raises(dflow.ExportError, match=message):
        dflow.load(tmp_path / "e")
