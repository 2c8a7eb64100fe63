"""Changed rows of a table: a copy that applies them equals the table, for any change and any consumer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.lowering.files.array_files import read_arrays
from dflow.tables import changed_rows
from dflow.testing import memory_cluster
from dflow.tracing.state.context import spreading
from tests.distributed.cluster.test_recovered_state import Tasks
from tests.distributed.waiting import until
from tests.effort import examples

pytestmark = pytest.mark.once

SHAPE = (40, 2)
IDS = 3


def numbers(table: dflow.ShardedVariable, consumer: str = "one") -> set[int]:
    """Return the numbers of the changed rows."""
    found = [number for places, _ in table.changed_rows(consumer) for number in places.tolist()]
    assert len(found) == len({*found})
    return {*found}


class Copy:
    """A copy of a table that a consumer keeps up to date."""

    def __init__(self, table: dflow.ShardedVariable, consumer: str) -> None:
        self._table, self._consumer, self.rows = table, consumer, np.full(table.shape, np.nan, np.float32)

    def apply(self, *, pieces: int | None = None) -> bool:
        """Apply changed rows; return whether these are all, and not as many pieces as given."""
        for count, (places, rows) in enumerate(self._table.changed_rows(self._consumer)):
            if count == pieces:
                return False
            self.rows[places] = rows
        return True

    def renew(self, *, pieces: int | None = None) -> None:
        """Apply changed rows; after all of them the copy equals the table."""
        if self.apply(pieces=pieces):
            np.testing.assert_array_equal(self.rows, self._table.read())


class Program:
    """A table, two copies of it, and the ways to change it; each takes row numbers, i32[IDS], and rows.

    `senders`  the worker and the parameter tasks; none in one process
    """

    def __init__(self, place: Callable[[], Any], folder: Path, senders: Sequence[Any] = ()) -> None:
        self.senders, self._numbers = senders, itertools.count()
        with place():
            self.table = dflow.ShardedVariable(
                lambda: jnp.ones(SHAPE), shards=2, by="modulo", name="changed", track_changes=True
            )
        self._folder, self.copies = folder, [Copy(self.table, name) for name in ("often", "seldom")]
        dflow.save(folder / "c", {"table": self.table})
        self.changes: dict[str, Callable[[Any, Any], Any]] = {
            "scatter_add": self.table.scatter_add,
            "compiled scatter_update": dflow.jit(self.table.scatter_update),
            "scan": dflow.jit(self._scanned),
            "cond": dflow.jit(self._branched),
            "while": dflow.jit(self._repeated),
            "differentiated": dflow.jit(self._differentiated),
            "assign": lambda ids, rows: self.table.assign(jnp.full(SHAPE, rows[0, 0])),
            "assign a shard": lambda ids, rows: self.table.shards[1].assign(jnp.full((20, 2), rows[0, 0])),
            "rows of a shard": lambda ids, rows: self.table.shards[0].scatter_add(jnp.array([-1, 25]), rows[:2]),
            "add to a shard": lambda ids, rows: self.table.shards[0].assign_add(jnp.full((20, 2), rows[0, 0])),
            "restore": lambda ids, rows: dflow.restore(self._folder / "c", {"table": self.table}),
        }
        if senders:  # in one process these have the same graphs
            self.changes |= {
                "Adagrad": dflow.jit(self._trained(optax.adagrad(0.1))),
                "Adam by rows": dflow.jit(self._trained(optax.adam(0.1), lazy_rows=True)),
                "Adam": dflow.jit(self._trained(optax.adam(0.1))),
                "sums in a scan": dflow.jit(self._summed),
            }

    def change(self, way: str, seed: int) -> None:
        draw = np.random.default_rng(seed)
        ids = draw.choice(SHAPE[0], IDS, replace=False).astype(np.int32) - 2  # -1 is the last row, -2 the one before
        self.changes[way](jnp.asarray(ids), jnp.asarray(draw.normal(size=(IDS, 2)), jnp.float32))

    def _trained(self, rule: optax.GradientTransformation, **options: Any) -> Callable[[Any, Any], None]:
        optimizer = dflow.Optimizer(rule, [self.table], name=f"optimizer_{next(self._numbers)}", **options)

        def step(ids: Any, rows: Any) -> None:
            def loss() -> Any:
                return ((self.table.gather(ids) - rows) ** 2).sum()

            optimizer.apply(dflow.grad(loss, [self.table])())

        return step

    def _scanned(self, ids: Any, rows: Any) -> None:
        def body(carry: Any, each: Any) -> Any:
            self.table.scatter_update(each[0][None], each[1][None])
            return carry, None

        jax.lax.scan(body, 0, (ids, rows))

    def _summed(self, ids: Any, rows: Any) -> None:
        jax.lax.scan(
            lambda carry, each: (self.table.scatter_add(each[0][None], each[1][None]), None), None, (ids, rows)
        )

    def _branched(self, ids: Any, rows: Any) -> None:
        jax.lax.cond(
            rows[0, 0] > 0,
            lambda: self.table.scatter_update(ids, rows),
            lambda: self.table.scatter_mul(ids[:1], rows[:1]),
        )

    def _repeated(self, ids: Any, rows: Any) -> None:
        def body(count: Any) -> Any:
            self.table.scatter_max(ids[count][None], rows[count][None])
            return count + 1

        jax.lax.while_loop(lambda count: count < 2, body, 0)

    def _differentiated(self, ids: Any, rows: Any) -> Any:
        def loss(x: Any) -> Any:
            self.table.shards[0].scatter_update(ids[:1], x[:1])
            return (x**2).sum()

        return dflow.grad(loss)(rows)


@pytest.fixture(scope="module", params=["one process", "cluster"])
def program(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("saved")
    if request.param == "one process":
        yield Program(nullcontext, folder)
        return
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield Program(worker.parameter_servers, folder, (worker, *(task.server for task in cluster.tasks.values())))


#: Ways that mark the rows that they change, and no others.
EXACT = {
    *("scatter_add", "compiled scatter_update", "rows of a shard"),
    *("Adagrad", "Adam by rows", "scan", "cond", "while"),
}


def test_each_change_reaches_a_copy(program: Program) -> None:
    for number, way in enumerate(program.changes):
        program.change(way, number)
        program.copies[0].renew()


@settings(max_examples=examples(6), deadline=None)
@given(data=st.data())
def test_copies_at_different_paces_equal_the_table(program: Program, data: st.DataObject) -> None:
    """One copy asks often and the other seldom; now and then a loop is left, with its rows applied or not."""
    for _ in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 3))):
            program.change(data.draw(st.sampled_from([*program.changes])), data.draw(st.integers(0, 99)))
        often, seldom = program.copies
        often.renew(pieces=data.draw(st.sampled_from([None, None, 0, 1])))
        if data.draw(st.booleans()):
            seldom.renew()
    for copy in program.copies:
        copy.renew()


def test_few_rows_are_yielded(program: Program) -> None:
    numbers(program.table)
    for number, way in enumerate(sorted(EXACT & program.changes.keys())):
        program.change(way, number)
        assert 1 <= len(numbers(program.table)) <= IDS, way
    assert not numbers(program.table)


def test_a_consumer_that_leaves_its_loop_gets_the_rows_again(program: Program) -> None:
    table = program.table
    assert numbers(table, "leaving") == {*range(SHAPE[0])}
    table.scatter_add(jnp.array([7, 7, 30]), jnp.ones((3, 2)))
    for places, rows in table.changed_rows("leaving"):
        assert {*places} == {7, 30}
        np.testing.assert_array_equal(rows, np.asarray(table.read())[places])
        break
    table.scatter_add(jnp.array([8]), jnp.ones((1, 2)))
    assert numbers(table, "leaving") == {7, 8, 30}
    assert numbers(table, "leaving") == set()
    assert numbers(table, "another") == {*range(SHAPE[0])}


def test_rows_come_in_pieces_of_bounded_size(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows in pieces of at most 8 rows of a shard, with rows that change between two pieces."""
    monkeypatch.setattr(changed_rows, "PIECE_BYTES", 8 * 2 * 2 * 4)
    copy = np.full(SHAPE, np.nan, np.float32)
    sizes = []
    for places, rows in program.table.changed_rows("in_pieces"):
        copy[places] = rows
        sizes.append(len(places))
        program.table.scatter_add(jnp.array([0, 39]), jnp.ones((2, 2)))
    assert sizes == [16, 16, 7]  # row 39 has changed since
    for places, rows in program.table.changed_rows("in_pieces"):
        assert {*places} == {0, 39}
        copy[places] = rows
    np.testing.assert_array_equal(copy, program.table.read())


def test_a_loop_within_which_the_table_is_restored_yields_all_rows_next(program: Program) -> None:
    copy = Copy(program.table, "restored")
    copy.renew()
    program.change("scatter_add", 1)
    for places, rows in program.table.changed_rows("restored"):
        program.change("restore", 0)
        copy.rows[places] = rows
    copy.renew()


def test_only_changed_rows_travel(program: Program) -> None:
    """The bytes of a question depend on the number of changed rows, and not on that of the table's."""
    table = program.table
    numbers(table)
    table.scatter_add(jnp.array([1, 5, 5, 38]), jnp.ones((4, 2)))

    def sent(sources: Sequence[Any]) -> int:
        return sum(edge.size_bytes for source in sources for edge in source.traffic())

    answered, asked = sent(program.senders[1:]), sent(program.senders[:1])
    assert numbers(table) == {1, 5, 38}
    # Three rows with their numbers, and from each task four numbers about its shard.
    assert sent(program.senders[1:]) - answered == (3 * (4 + 2 * 4) + 2 * (4 * 4) if program.senders else 0)
    assert sent(program.senders[:1]) - asked == (2 * (2 * 4 + 4 * 4) if program.senders else 0)


def test_no_change_of_asynchronous_workers_is_missed() -> None:
    """A consumer asks again and again while two workers train."""
    with (
        memory_cluster(ps=2, workers=2) as cluster,
        closing(cluster.worker(0)) as first,
        closing(cluster.worker(1)) as second,
        ThreadPoolExecutor(2) as threads,
    ):

        def made(worker: Any) -> tuple[dflow.Embedding, dflow.Optimizer]:
            with worker.parameter_servers():
                table = dflow.Embedding(1000, 4, name="table", by="modulo", track_changes=True)
                return table, dflow.Optimizer(optax.adagrad(0.1), [table], name="optimizer")

        def train(worker: Any, table: dflow.Embedding, optimizer: dflow.Optimizer) -> None:
            @dflow.jit
            def step(ids: Any) -> None:
                def loss() -> Any:
                    return (table(ids) ** 2).sum()

                optimizer.apply(dflow.grad(loss, [table])())

            def batches() -> Iterator[Any]:
                draw = np.random.default_rng(worker.index)
                while not has_asked.is_set():
                    yield draw.integers(0, 1000, 8).astype(np.int32)

            for _ in dflow.distributed.Async(worker).run(step, batches(), steps=10**6, name="run"):
                trained.add(worker.index)

        has_asked, trained, models = threading.Event(), set[int](), [made(first), made(second)]
        copy = Copy(models[0][0], "beside")
        runs = [threads.submit(train, worker, *model) for worker, model in zip((first, second), models, strict=True)]
        try:
            until(lambda: len(trained) == 2 or any(run.done() for run in runs))
            for _ in range(20):
                copy.apply()
        finally:
            has_asked.set()
        for run in runs:
            run.result()
        copy.renew()


def test_all_rows_are_yielded_after_a_return_to_a_snapshot(tmp_path: Path) -> None:
    """A row that had changed since the snapshot has its old value again, on all tasks."""
    tasks = Tasks(tmp_path, every_s=3600.0)
    with closing(tasks):
        with tasks.worker.parameter_servers():
            table = dflow.ShardedVariable(lambda: jnp.ones(SHAPE), name="table", track_changes=True)
        copy = Copy(table, "one")
        copy.renew()
        snapshots = tasks.coordinator._state.core.part(ClusterSnapshots)
        with tasks.worker.parameter_servers():
            later = dflow.Variable(0, name="later")
        assert later.read() == 0
        until(lambda: "later" in snapshots.committed.names)
        table.scatter_add(jnp.array([1, 39]), jnp.ones((2, 2)))
        copy.renew()
        tasks.start_again(0)
        tasks.worker.steps.await_recovery()
        assert (table.read() == 1).all()
        copy.renew()
        table.scatter_add(jnp.array([2]), jnp.ones((1, 2)))
        assert numbers(table, "one") == {2}


def test_a_process_that_does_not_mark_rows_is_refused() -> None:
    with (
        memory_cluster(ps=1, workers=2) as cluster,
        closing(cluster.worker(0)) as one,
        closing(cluster.worker(1)) as two,
    ):
        made = []
        for worker in (one, two):
            with worker.parameter_servers():
                made.append(dflow.ShardedVariable(lambda: jnp.ones(SHAPE), name="table", track_changes=worker is one))
        with pytest.raises(
            dflow.VariableError, match=r"writes variable 'table/0' and does not mark the rows(.|\n)*in every"
        ):
            made[1].scatter_add(jnp.array([1]), jnp.ones((1, 2)))
        assert (made[0].read() == 1).all()
        made[1].assign(jnp.zeros(SHAPE))
        assert numbers(made[0]) == {*range(SHAPE[0])}


def test_a_rule_of_derivatives_that_changes_rows_marks_them() -> None:
    table = dflow.ShardedVariable(jnp.ones(SHAPE), name="ruled", track_changes=True)
    numbers(table)

    @jax.custom_jvp
    def noted(x: Any) -> Any:
        table.scatter_update(jnp.array([3]), x[None])
        return x

    noted.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    dflow.jit(noted)(jnp.zeros(2))
    assert 3 in numbers(table)


def test_a_table_without_rows_has_no_changes() -> None:
    assert numbers(dflow.ShardedVariable(jnp.zeros((0, 2)), track_changes=True)) == set()


def test_a_container_holds_the_marks_and_saves_the_table_alone(tmp_path: Path) -> None:
    with dflow.container("tracked"):
        table = dflow.ShardedVariable(jnp.ones(SHAPE), shards=2, name="table", track_changes=True)
    numbers(table)
    dflow.save(tmp_path / "c", "tracked")
    assert read_arrays(tmp_path / "c").types.keys() == {"tracked/table"}
    dflow.reset_container("tracked")
    with pytest.raises(dflow.VariableError, match="container 'tracked' was reset"):
        table.shards[0].marks.read()


def traced(table: dflow.ShardedVariable) -> None:
    @dflow.jit
    def step() -> None:
        for _ in table.changed_rows("a"):
            pass

    step()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: dflow.ShardedVariable(jnp.ones(SHAPE), name="t").changed_rows("a"),
            "'t': expected one that tracks changed rows",
        ),
        (
            lambda: dflow.ShardedVariable(jnp.ones(SHAPE), track_changes=True).changed_rows("a/b"),
            "expected a name, got 'a/b'",
        ),
        (
            lambda: dflow.ShardedVariable(jnp.ones(SHAPE), by="columns", track_changes=True),
            "expected a division by rows or modulo, got by columns",
        ),
        (
            lambda: traced(dflow.ShardedVariable(jnp.ones(SHAPE), track_changes=True)),
            "is called inside traced code",
        ),
        (lambda: dflow.Variable(1, name="t/~changes"), "'t/~changes', as only marks of changed rows are"),
    ],
)
def test_a_table_that_cannot_tell_its_changes_is_refused(use: Callable[[], Any], message: str) -> None:
    with pytest.raises(dflow.VariableError, match=message):
        use()


def test_a_copy_in_each_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with (
        spreading(lambda variable: None),
        pytest.raises(dflow.VariableError, match=r"track_changes: expected a table on parameter tasks(.|\n)*leave"),
    ):
        dflow.Embedding(9, 2, track_changes=True, name="a copy of changes")
