"""Tables with a vocabulary against a model in Python, and steps of other workers between a lookup and its update."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
from dflow.testing import memory_cluster
from dflow.tracing.ir.id_hash import mixed
from dflow.tracing.state.context import spreading
from tests.dflow.tables.vocabulary_model import RATE, VocabularyModel, murmur3
from tests.dflow.tables.vocabulary_program import GrowingTable
from tests.effort import examples

pytestmark = pytest.mark.once

CONFIGS = [
    dflow.Vocabulary("lru", 1, bucket=2),
    dflow.Vocabulary("lfu", 3, bucket=2),
    dflow.Vocabulary("lru", 1, bucket=2, expire_after=2),
]
IDS = st.sampled_from([0, 1, 2, 3, 5, 2**32, 2**32 + 1, 2**33 + 5, -1, -(2**63), 2**63 - 1, 77, 78, 79])


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def trained(request: Any) -> tuple[GrowingTable, Any]:
    made = GrowingTable(request.param, 6, name="trained")
    return made, np.array(made.table.read())


def check(made: GrowingTable, model: VocabularyModel) -> None:
    assert made.owners() == model.owners()
    np.testing.assert_allclose(made.table.read(), model.rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(made.accumulators(), model.slots, rtol=1e-5)
    counts = made.table.counts()
    assert counts._asdict() == {"left_out": 0} | {name: model.counts[name] for name in counts._fields}


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.lists(IDS, min_size=1, max_size=6).map(lambda ids: (ids * 6)[:6]), min_size=1, max_size=9))
def test_random_steps_do_as_the_model(trained: tuple[GrowingTable, Any], batches: list[list[int]]) -> None:
    made, initial = trained
    made.clear(initial)
    model = made.model()
    for ids in batches:
        before = model.rows.copy()
        looked_up = model.step(ids)
        after = made.train(ids)
        # The rows after the step, of the ids as they were found before it.
        np.testing.assert_allclose(after, model.rows[looked_up], rtol=1e-5, atol=1e-6)
        assert not np.isclose(before[looked_up], 0).all(1).any()
        assert made.owners() == model.owners()
    check(made, model)
    np.testing.assert_allclose(made.table(np.array(ids)), model.rows[[*map(model.row, ids)]], rtol=1e-5, atol=1e-6)
    # As a task finds them for a server, without a step.
    hooks, wide = made.table.shards[0].hooks, dflow.wide_ids(np.array(batches, np.int64).reshape(-1))
    held = {one.name: np.asarray(one.read()) for one in (*hooks.saved.values(), hooks.ledger)}
    found = hooks.id_rows.find(np.stack([wide.high, wide.low], 1), lambda name, rows: held[name][rows])
    assert found.tolist() == [model.row(id) for ids in batches for id in ids]


def batches(count: int = 8) -> Iterator[Any]:
    draw = np.random.default_rng(3)
    for _ in range(count):
        yield draw.zipf(1.3, 24).astype(np.int64) * 2**35 + 1


def test_a_cluster_does_as_the_model() -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        config = dflow.Vocabulary("lru", 2, bucket=4, expire_after=3)
        made = GrowingTable(config, 40, place=worker.parameter_servers())
        model = made.model()
        for shard in made.table.shards:
            assert {one.device for one in shard.hooks.saved.values()} == {shard.device}
        for ids in batches():
            looked_up = model.step(ids.tolist())
            np.testing.assert_allclose(made.train(ids), model.rows[looked_up], rtol=1e-5, atol=1e-6)
        sent = worker.server.channel.traffic()
        assert model.counts["evicted"]
        check(made, model)
        # Of each id 8 bytes there, and a row in each direction, for at most 24 ids in a step; and some numbers.
        assert sum(edge.size_bytes for edge in sent) <= 8 * 2 * (24 * (8 + 12) + 64)
        later = [ids + 2**35 for ids in batches()]  # most ids return after they have expired
        for ids in later:
            model.step(ids.tolist())
        strategy = dflow.distributed.Sync(worker)
        assert len([*strategy.run(made.step, map(dflow.wide_ids, later), steps=len(later), name="later")]) == 8
        check(made, model)


def test_training_goes_on_after_a_restore_onto_other_shards(tmp_path: Path) -> None:
    config, draw = dflow.Vocabulary("lru", 2, bucket=2, expire_after=4), np.random.default_rng(0)
    with dflow.container("first"):
        saved = GrowingTable(config, 20, shards=1, name="saved")
    with dflow.container("second"):
        other = GrowingTable(config, 20, shards=2, name="saved")
    for made, count in ((saved, 12), (other, 3)):
        for _ in range(count):
            made.train(draw.integers(0, 30, 6))
    for _ in range(3):
        saved.train([7] * 6)
    dflow.save(tmp_path / "saved", {"table": saved.table, "optimizer": saved.optimizer})
    state = {"table": other.table, "optimizer": other.optimizer}
    report = dflow.restore(tmp_path / "saved", state, names=lambda name: name.replace("second/", "first/"))
    own = {f"first/saved{kind}" for kind in ("", "/ids", "/born", "/seen", "/sightings")}
    assert {*report.restored} == own | {"first/saved/optimizer/0/sum_of_squares/saved"}
    assert saved.clocks() == other.clocks() == {16}
    evicted = saved.table.counts().evicted
    for ids in draw.integers(0, 30, (8, 6)):
        np.testing.assert_allclose(saved.table(ids), other.table(ids), rtol=1e-6)
        np.testing.assert_allclose(saved.train(ids), other.train(ids), rtol=1e-6)
        assert saved.owners() == other.owners()
    assert saved.table.counts().evicted > evicted


def test_a_new_id_begins_with_initial_rows() -> None:
    """With a dense update, and a norm of all gradients: a row that another id had is as if it was new."""
    transformation = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1, momentum=0.5))
    table = dflow.Embedding(1, 2, vocabulary=dflow.Vocabulary(bucket=1), name="one row")
    optimizer = dflow.Optimizer(transformation, [table], name="slots")
    initial = table.read()

    @dflow.jit
    def step(ids: dflow.WideIds) -> None:
        found = table.find(ids)
        optimizer.apply(dflow.grad(lambda: table(found).sum(), [table])(), found=found)

    def rows() -> list[Any]:
        slots = [slot for slot in jax.tree.leaves(optimizer.slots, is_leaf=dflow.is_variable) if slot.shape == (2, 2)]
        return [slot.read()[0] for slot in (*table.shards, *slots)]

    fresh = rows()
    for id in (1, 1, 1):
        step(dflow.wide_ids([id]))
    assert not np.allclose(table.read()[0], initial[0])
    step(dflow.wide_ids([2]))
    # Compiled with the step, XLA may compute the last bit of an initial row in another way.
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), rows(), fresh)
    # What was found before is not looked up in the row of another id.
    before = table.find([2])
    np.testing.assert_array_equal(table(before), table.read()[:1])
    step(dflow.wide_ids([3]))
    np.testing.assert_array_equal(table(before), table.read()[1:])
    assert table.counts() == dflow.VocabularyCounts(2, 3, 3, 2, 0, 0)


def test_the_time_of_a_step_does_not_depend_on_the_size_of_the_table() -> None:
    made = GrowingTable(dflow.Vocabulary(expire_after=9), 1_000_000)
    ids = dflow.wide_ids(np.arange(8))
    lowered = made.step.lower(ids)
    assert "callback" not in lowered.as_text()  # JAX keeps no program with one for later processes
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1_000_000


def test_the_gradients_of_several_lookups_of_a_step_add_up() -> None:
    table = dflow.Embedding(8, 2, vocabulary=dflow.Vocabulary(bucket=8), name="looked up twice")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [table])

    @dflow.jit
    def step(first: dflow.WideIds, second: dflow.WideIds) -> None:
        found = [table.find(first), table.find(second)]
        loss = dflow.grad(lambda: table.bag(found[0]).sum() + 2 * table(found[1]).sum(), [table])
        optimizer.apply(loss(), found=found)

    for _ in range(2):
        before = table(np.array([1, 2, 3]))
        step(dflow.wide_ids([[1, 2]]), dflow.wide_ids([2, 3]))
    np.testing.assert_allclose(before - table(np.array([1, 2, 3])), [[1, 1], [3, 3], [2, 2]], rtol=1e-5)
    assert table.counts()[:4] == (4, 4, 3, 0)


def test_an_id_in_several_lookups_of_a_step_is_used_once() -> None:
    config = dflow.Vocabulary("lfu", admit_after=2, bucket=1)
    table = dflow.Embedding(1, 2, vocabulary=config, name="in several lookups")
    adagrad = dflow.Optimizer(optax.adagrad(0.1), [table], name="optimizer of several lookups")

    @dflow.jit
    def step(ids: Any) -> None:
        found = [table.find(ids), table.find(ids)]
        gradients = dflow.grad(lambda: sum(table(one).sum() for one in found), [table])()
        adagrad.apply(gradients, found=found)

    seen = []
    for _ in range(4):
        step(np.array([2**40]))
        seen.append((table.counts().admitted, int(table.shards[0].hooks.saved["uses"].read()[0])))
    assert seen == [(0, 0), (1, 1), (1, 2), (1, 3)]


def test_an_id_becomes_two_words_of_32_bits() -> None:
    wide = dflow.wide_ids(np.array([[2**40 + 5, -1]]))
    np.testing.assert_array_equal(wide.high, [[256, 2**32 - 1]])
    np.testing.assert_array_equal(wide.low, [[5, 2**32 - 1]])
    assert dflow.wide_ids(np.array([2**64 - 1], np.uint64)).high == 2**32 - 1
    one, other, again = (dflow.wide_ids([text]) for text in ("ä", "b", b"\xc3\xa4"))
    assert (one.high, one.low) == (again.high, again.low) != (other.high, other.low)
    for dtype in (np.int8, np.uint16, np.int32, np.uint32):
        given = np.array([-1, 5]).astype(dtype)
        found, wanted = dflow.wide_ids(jnp.asarray(given)), dflow.wide_ids(given)
        np.testing.assert_array_equal([found.high, found.low], [wanted.high, wanted.low])
    for wrong in (jnp.array([1.5]), np.array([1.5])):
        with pytest.raises(dflow.InputError, match="wide ids: expected"):
            dflow.wide_ids(wrong)


def test_the_hash_is_as_published() -> None:
    assert murmur3(0) == 0x63852AFC  # of 8 zeros
    ids = [0, 1, 2**32, 2**64 - 1, 123456789012345678]
    wide = dflow.wide_ids(np.array(ids, np.uint64))
    found = mixed(wide.high, wide.low)
    assert found.tolist() == [*map(murmur3, ids)]


TABLE = dflow.Embedding(10, 2, vocabulary=dflow.Vocabulary(), name="growing_words")
OPTIMIZER = dflow.Optimizer(optax.sgd(0.1), [TABLE])
PLAIN = dflow.Embedding(10, 2, name="plain_words")


def test_a_lookup_of_no_ids_has_their_shape() -> None:
    assert TABLE(np.zeros((2, 0), np.int64)).shape == (2, 0, 2)
    assert TABLE.find([]).shape == (0,)


def test_other_variables_have_gradients_of_lookups_of_ids() -> None:
    weights = dflow.Variable(jnp.ones(2), name="weights of words")

    def loss() -> Any:
        return (TABLE(np.array([1, 2])) @ weights).sum()

    [gradient] = dflow.jit(dflow.grad(loss, [weights]))()
    np.testing.assert_allclose(gradient, TABLE(np.array([1, 2])).sum(0), rtol=1e-6)


def test_slots_without_rows_are_refused() -> None:
    table = dflow.Embedding(9, 2, vocabulary=dflow.Vocabulary(), name="for adafactor")
    optimizer = dflow.Optimizer(optax.adafactor(0.1), [table])
    gradients = [jax.tree.map(jnp.zeros_like, dflow.read(table))]
    with pytest.raises(dflow.VariableError, match="expected a row for each of 'for adafactor/0'"):
        optimizer.apply(gradients, found=table.find([1]))


def test_a_copy_in_each_worker_is_refused() -> None:
    with (
        spreading(lambda variable: None),
        pytest.raises(dflow.VariableError, match="expected it on parameter tasks or in one process"),
    ):
        dflow.Embedding(9, 2, vocabulary=dflow.Vocabulary(), name="copied")


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: TABLE(jnp.array([1.5])), dflow.InputError, "got a JAX array of float32"),
        (lambda: dflow.jit(PLAIN)(np.array([2**40])), dflow.InputError, "expected integers from .*got 1099511627776"),
        (lambda: TABLE.gather(np.array([1])), dflow.VariableError, r"look ids up by growing_words\(ids\)"),
        (lambda: TABLE[np.array([1])], dflow.VariableError, "'growing_words' has a vocabulary"),
        (
            dflow.grad(lambda: TABLE(np.array([1])).sum(), [TABLE]),
            dflow.VariableError,
            r"found = growing_words.find\(ids\), look up growing_words\(found\)",
        ),
        (
            lambda: OPTIMIZER.apply([jax.tree.map(jnp.zeros_like, dflow.read(TABLE))]),
            dflow.GraphTypeError,
            "apply: expected found=, the ids found in table 'growing_words', got none",
        ),
        (
            lambda: dflow.Optimizer(optax.sgd(0.1), [PLAIN]).apply([PLAIN], found=TABLE.find([1])),
            dflow.GraphTypeError,
            "expected ids found in tables of",
        ),
        (
            lambda: OPTIMIZER.apply([TABLE], found=dflow.wide_ids([1])),
            dflow.GraphTypeError,
            "found: expected what table.find.ids. returned, or several of these, got WideIds",
        ),
        (
            lambda: dflow.Embedding(9, 2, vocabulary=True),  # type: ignore[arg-type]
            dflow.VariableError,
            "vocabulary: expected dflow.Vocabulary or None, got True",
        ),
        (
            lambda: dflow.Embedding(9, 2, vocabulary=dflow.Vocabulary(), track_changes=True),
            dflow.VariableError,
            "track_changes: expected a table without a vocabulary",
        ),
        (lambda: PLAIN(TABLE.find([1])), dflow.InputError, "'plain_words': expected integers, got FoundIds"),
        (lambda: PLAIN(dflow.wide_ids([1])), dflow.InputError, "lookup in table 'plain_words', which has none"),
        (lambda: PLAIN.find([1]), dflow.VariableError, "'plain_words' has no vocabulary"),
        (PLAIN.counts, dflow.VariableError, "'plain_words' has no vocabulary"),
        (lambda: dflow.Vocabulary("fifo"), dflow.VariableError, "expected one of"),
        *(
            (
                lambda age=age: dflow.Vocabulary(expire_after=age),
                dflow.VariableError,
                f"expire_after: expected a number of updates from 1 to 4294967295, or None, got {age!r}",
            )
            for age in (0, -1, 2**32, "10", 10.0, True)
        ),
        *(
            (
                lambda name=name, count=count: dflow.Vocabulary(**{name: count}),
                dflow.VariableError,
                f"{name}: expected an integer from 1 to 4294967295, got {count!r}",
            )
            for name, counts in {"bucket": (0, 2.5, True), "admit_after": ("2", 2**32)}.items()
            for count in counts
        ),
        (
            lambda: dflow.Embedding(9, 2, by="modulo", vocabulary=dflow.Vocabulary()),
            dflow.VariableError,
            "expected a division by rows",
        ),
        (
            lambda: dflow.Embedding(
                9000, 100, vocabulary=dflow.Vocabulary(), initializer=jax.nn.initializers.orthogonal()
            ),
            dflow.VariableError,
            "expected an initialiser that computes each row by itself",
        ),
        (
            lambda: TABLE(dflow.WideIds(np.zeros(2, np.uint32), np.zeros(3, np.uint32))),
            dflow.InputError,
            "expected two arrays of uint32 of one shape",
        ),
    ],
)
def test_what_a_vocabulary_cannot_do_is_refused(use: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        use()


#: Ids of the only bucket, which has one row for them.
ONE, OTHER = 7, 8
DEADLINE_S = 60.0


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    with (
        memory_cluster(ps=1, workers=2) as cluster,
        closing(cluster.worker(0)) as first,
        closing(cluster.worker(1)) as second,
    ):
        yield [first, second]


class Program:
    """A table with a row for one id, and a worker's step, which waits between its lookup and its update."""

    def __init__(
        self,
        worker: Any,
        transformation: Any,
        wait: Callable[[], None] = lambda: None,
        *,
        admit_after: int = 1,
        lazy_rows: bool = False,
    ) -> None:
        config = dflow.Vocabulary(admit_after=admit_after, bucket=1)
        with worker.parameter_servers():
            self.table = table = dflow.Embedding(1, 2, vocabulary=config, name="table")
            self.optimizer = optimizer = dflow.Optimizer(transformation, [table], name="optimizer", lazy_rows=lazy_rows)

        def waited(rows: Any) -> Any:
            wait()
            return np.ones_like(rows)

        @dflow.jit
        def step(id: dflow.WideIds) -> None:
            found = table.find(id)

            def loss() -> Any:
                rows = table(found)
                type = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
                return (rows * jax.pure_callback(waited, type, jax.lax.stop_gradient(rows))).sum()

            optimizer.apply(dflow.grad(loss, [table])(), found=found)

        self.step = step

    def train(self, id: int) -> None:
        self.step(dflow.wide_ids([id]))

    def state(self) -> list[Any]:
        """The row that one id owns, in the table and in the slots."""
        slots = jax.tree.leaves(self.optimizer.slots, is_leaf=dflow.is_variable)
        return [v.read()[0] for v in (*self.table.shards, *(slot for slot in slots if slot.shape == (2, 2)))]


def test_all_processes_give_a_table_the_same_settings(workers: list[Any]) -> None:
    Program(workers[0], optax.sgd(RATE), admit_after=2)
    message = r"vocabulary of table 'table': expected Vocabulary\(.*admit_after=2.*, got Vocabulary\(.*admit_after=1"
    with pytest.raises(dflow.VariableError, match=message):
        Program(workers[1], optax.sgd(RATE))


@pytest.mark.parametrize(
    ("transformation", "lazy_rows"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(RATE)), False),
        (optax.adam(RATE), True),
    ],
)
def test_an_update_leaves_out_rows_that_have_another_id(
    workers: list[Any], transformation: Any, lazy_rows: bool
) -> None:
    looked_up, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        looked_up.set()
        assert go_on.wait(DEADLINE_S)

    slow = Program(workers[0], transformation, wait, admit_after=2, lazy_rows=lazy_rows)
    other = Program(workers[1], transformation, admit_after=2, lazy_rows=lazy_rows)
    fresh = other.state()
    for _ in range(3):
        other.train(ONE)
    assert not np.allclose(other.state()[0], fresh[0])
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(slow.train, ONE)
        assert looked_up.wait(DEADLINE_S)
        for _ in range(2):
            other.train(OTHER)
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-6), other.state(), fresh)
        other.train(OTHER)
        before = other.state()
        go_on.set()
        late.result(DEADLINE_S)
    jax.tree.map(np.testing.assert_array_equal, other.state(), before)
    # The late step saw its id once, so the row stays with the other one.
    assert other.table.counts() == dflow.VocabularyCounts(3, 4, 2, 1, 0, 1)


def test_a_synchronous_step_takes_no_row_that_it_has_looked_up(
    workers: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The first worker looks an id up, the second one asks for its row, and then the first one gives its gradient."""
    looked_up, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        looked_up.set()
        assert go_on.wait(DEADLINE_S)

    def asked() -> None:
        if looked_up.is_set():
            go_on.set()  # within the step: the last result of a run comes after its round, which needs both gradients

    first, second = Program(workers[0], optax.sgd(1.0), wait), Program(workers[1], optax.sgd(1.0), asked)
    second.train(ONE)
    [fresh] = second.state()

    def train(index: int) -> int:
        program, id = (first, ONE) if index == 0 else (second, OTHER)

        def batches() -> Iterator[Any]:
            for number in itertools.count():
                if index == 1 and number == 0:
                    assert looked_up.wait(DEADLINE_S)
                yield dflow.wide_ids([id])

        return len([*dflow.distributed.Sync(workers[index]).run(program.step, batches(), steps=1, name="run")])

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(train, range(2))] == [1, 1]
    np.testing.assert_allclose(second.state()[0], fresh - 0.5, rtol=1e-6)
    assert "ids were refused" not in caplog.text
    dflow.save(tmp_path / "saved", [second.table])
    assert "table 'table': ids were refused a row 1 times" in caplog.text
    caplog.clear()
    assert second.table.counts() == dflow.VocabularyCounts(1, 2, 1, 0, 1, 0)
    assert not caplog.text
    second.train(OTHER)
    np.testing.assert_allclose(second.state()[0], fresh, rtol=1e-6)


def test_an_id_of_a_synchronous_step_is_there_after_the_update() -> None:
    """Before that its row may get a gradient of the id that had it."""
    table = dflow.Embedding(1, 2, vocabulary=dflow.Vocabulary(bucket=1), name="one row")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [table])
    zeros = jnp.zeros((2, 2))
    optimizer.apply([jax.tree.map(lambda _: zeros, table)], found=table.find([ONE]))
    fresh = table.read()
    one, [shard] = table.find([ONE]), table.shards
    assert one.shards[0].rows.tolist() == [0]
    shard.hooks.admit(table.find([OTHER]).shards)
    assert table.find([OTHER]).shards[0].rows.tolist() == [1]
    optimizer.apply_mean(([jax.tree.map(lambda _: zeros + 1, table)], {}))
    np.testing.assert_allclose(table.read() - fresh, [[0, 0], [-1, -1]], rtol=1e-6)
    assert table.find([OTHER]).shards[0].rows.tolist() == [0]
