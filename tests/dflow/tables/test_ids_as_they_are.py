"""Ids of a batch as they are, strings and integers of 64 bits: the rows that `wide_ids` finds, and uses as numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.collectives.agreed_programs import AgreedPrograms
from dflow.distributed.collectives.collectives import Collectives
from dflow.testing import memory_cluster
from dflow.tracing.wide_ids import IntegerIds, StringIds, WideIds

NAMES = [f"user-{number}" for number in range(6)]
STEPS = 4


def arrow(ids: Any) -> Any:
    return pytest.importorskip("pyarrow").array(ids)


def pandas(ids: Any) -> Any:
    return pytest.importorskip("pandas").Series(ids)


#: Ids of six users in the forms that a batch may have.
FORMS: dict[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "list": lambda users: [NAMES[user] for user in users],
    "strings": lambda users: np.array([NAMES[user] for user in users]),
    "objects": lambda users: np.array([NAMES[user].encode() for user in users], object),
    "arrow": lambda users: arrow([NAMES[user] for user in users]),
    "pandas": lambda users: pandas(users + 2**40),
    # Some batches have no number beyond 32 bits.
    "int64": lambda users: np.where(users > 2, users - 2**40, users) if users[0] else users % 3 - 2,
    "uint64": lambda users: users.astype(np.uint64) + np.uint64(2**63),
}


class Program:
    """A table with a vocabulary, and a step that trains it."""

    def __init__(self, place: AbstractContextManager[None], name: str) -> None:
        with place:
            self.table = table = dflow.Embedding(64, 2, vocabulary=dflow.Vocabulary(), name=name)
            optimizer = dflow.Optimizer(optax.sgd(0.1), [table], name=f"{name}/optimizer")

        @dflow.jit
        def step(batch: Any) -> Any:
            found = table.find(batch["user"])

            def loss() -> Any:
                return (table(found).sum(-1) ** 2).sum()

            value, gradients = dflow.value_and_grad(loss, [table])()
            optimizer.apply(gradients, found=found)
            return value

        self.step = step


def users_of(step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(step).integers(0, 6, size=5)


def expected(form: str) -> tuple[np.ndarray[Any, Any], list[float]]:
    """Rows of the first batch after training by `wide_ids`, and the losses."""
    return _expected(form if "64" in form or form == "pandas" else "strings")


@cache
def _expected(form: str) -> tuple[np.ndarray[Any, Any], list[float]]:
    program = Program(nullcontext(), "users")
    wide = [dflow.wide_ids(np.asarray(FORMS[form](users_of(step)))) for step in range(STEPS)]
    losses = [float(program.step({"user": ids})) for ids in wide]
    return np.asarray(program.table(wide[0])), losses


@pytest.mark.parametrize("form", FORMS)
def test_a_step_takes_ids_as_they_are(form: str) -> None:
    rows, losses = expected(form)
    program = Program(nullcontext(), "users")
    batches = [{"user": FORMS[form](users_of(step))} for step in range(STEPS)]
    assert [float(program.step(batch)) for batch in batches] == losses
    for lookup in (program.table, dflow.jit(program.table)):
        np.testing.assert_array_equal(lookup(batches[0]["user"]), rows)
    assert len(program.step.trace_log()) <= 2  # integers: once before the first beyond 32 bits, and once after it


def hybrid(worker: Any) -> Any:
    """Return the strategy of a group of one worker, which has no runtime to start."""
    collectives = worker.part(Collectives)
    collectives.group = SimpleNamespace(
        number=1, names=("worker:0",), index=0, exchange=lambda _, word, **__: (word,), computing=nullcontext
    )
    collectives.programs = AgreedPrograms(collectives.group)
    return dflow.distributed.Hybrid(worker)


STRATEGIES = {
    "hybrid": hybrid,
    "async": dflow.distributed.Async,
    "ahead": lambda worker: dflow.distributed.Async(worker, prefetch=True, lookahead=True),
    "sync": dflow.distributed.Sync,
}


@pytest.mark.parametrize(
    ("form", "strategy"), [("list", "sync"), ("list", "ahead"), ("int64", "async"), ("strings", "hybrid")]
)
def test_a_strategy_takes_ids_as_they_are(form: str, strategy: str, caplog: Any) -> None:
    rows, losses = expected(form)
    batches = [{"user": FORMS[form](users_of(step))} for step in range(STEPS)]
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        program = Program(worker.parameter_servers(), "users")
        run = STRATEGIES[strategy](worker).run(program.step, iter(batches), steps=STEPS)
        np.testing.assert_allclose([*map(float, run)], losses, rtol=1e-6)
        np.testing.assert_allclose(program.table(batches[0]["user"]), rows, rtol=1e-6)
    assert "has no effect" not in caplog.text


TABLE = dflow.Embedding(9, 2, vocabulary=dflow.Vocabulary(), name="users_as_they_are")
PLAIN = dflow.Embedding(9, 2, name="plain_users")


@pytest.mark.parametrize(
    "use",
    [
        lambda ids: jax.lax.add(ids, 1),
        jnp.sum,
        lambda ids: ids % 9,
        lambda ids: ids == ids,
        PLAIN,
        lambda ids: PLAIN.bag(ids[None]),
        PLAIN.gather,
        lambda ids: ids.astype(jnp.int32),
        lambda ids: {"ids": (ids,)},
        lambda ids: jnp.concatenate([ids, ids]),
    ],
)
@pytest.mark.parametrize("given", [["a", "b"], np.array([1, 2**40])], ids=["strings", "int64"])
def test_ids_that_are_used_as_numbers_name_the_argument(use: Any, given: Any) -> None:
    step = dflow.jit(lambda batch, rate: use(batch["user"]))
    message = r"argument 'batch/user': expected (a lookup of its|integers from)"
    with pytest.raises(dflow.InputError, match=message) as caught:
        step({"user": given}, 0.5)
    assert "test_ids_as_they_are.py:" in str(caught.value)
    with pytest.raises(dflow.InputError, match=message), dflow.eager():
        step({"user": given}, 0.5)


def test_structures_of_strings_and_of_integers_differ() -> None:
    wide, strings, integers = (jax.tree.structure(kind(0, 0)) for kind in (WideIds, StringIds, IntegerIds))
    assert wide != strings != integers != wide


def test_ids_pass_through_transformations() -> None:
    rows = np.asarray(TABLE(NAMES))
    found = dflow.jit(lambda ids: [jax.lax.map(TABLE, ids), jax.vmap(TABLE)(ids), jnp.stack([*map(TABLE, ids)])])(NAMES)
    np.testing.assert_array_equal(found, [rows] * 3)
    np.testing.assert_array_equal(dflow.jit(lambda ids: TABLE(ids.reshape(3, 2)))(NAMES), rows.reshape(3, 2, 2))


def test_a_trace_names_strings_as_the_argument_that_changed() -> None:
    step = dflow.jit(lambda ids: TABLE(ids).sum())
    step(np.arange(3))  # which JAX makes int32
    step(np.arange(3) + 2**40)
    step(["a"])
    assert [record.changes for record in step.trace_log().records][1:] == [
        ("ids: i32[3] -> i64[3]",),
        ("ids: i64[3] -> strings[1]",),
    ]


def test_the_id_of_a_string_is_that_of_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "tables.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (?:`\"(.*)\"`|none, as bytes) \| `?([0-9a-f]*)`? ?\| `([0-9a-f]{16})` \| (\d+) \|$", text, re.M
    )
    assert len(rows) == 7
    for string, encoded, digest, id in rows:
        given = bytes.fromhex(encoded)
        assert string.encode() in (given, b"")
        for one in [given, string] if string else [given]:
            wide = dflow.wide_ids([one])
            assert (
                (int(wide.high[0]) << 32 | int(wide.low[0]))
                == int(id)
                == int.from_bytes(bytes.fromhex(digest), "little")
            )


def test_a_queue_holds_the_ids_of_strings() -> None:
    spec = {"user": jax.ShapeDtypeStruct((2,), np.str_), "rating": jax.ShapeDtypeStruct((), jnp.float32)}
    queue = dflow.FIFOQueue(9, spec, name="names")
    step = dflow.jit(lambda: TABLE(queue.dequeue()["user"]))
    for form in (["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object), arrow(["a", "b"])):
        queue.enqueue({"user": form, "rating": 0.5})
        np.testing.assert_array_equal(step(), TABLE(["a", "b"]))
    queue.enqueue_many({"user": [["a", "b"], ["c", "d"]], "rating": np.zeros(2, np.float32)})
    assert TABLE(queue.dequeue_many(2)["user"]).shape == (2, 2, 2)
    assert repr(queue) == "<FIFOQueue 'names': queue<f32[], str[2]>, capacity 9>"
    one = dflow.FIFOQueue(3, jax.ShapeDtypeStruct((), np.str_))
    with dflow.data.feed(iter(["a", "b"]), one):
        np.testing.assert_array_equal(TABLE(one.dequeue_many(2)), TABLE(["a", "b"]))
    with pytest.raises(dflow.InputError, match=r"enqueue of queue 'names': element/user: .* got None at \(1,\)"):
        queue.enqueue({"user": ["a", None], "rating": 0.5})
    numbers = dflow.FIFOQueue(3, jax.ShapeDtypeStruct((2,), jnp.float32), name="numbers")
    with pytest.raises(dflow.QueueTypeError, match=r"(?s)holds f32\[2\] but enqueue was given str\[2\].*numpy.str_"):
        numbers.enqueue(["a", "b"])


@pytest.mark.filterwarnings("ignore:step is traced and compiled again during a run:dflow.RetraceWarning")
def test_evaluations_and_all_reduce_take_ids_as_they_are() -> None:
    program = Program(nullcontext(), "users")
    batches = [{"user": FORMS[form](users_of(0))} for form in ("list", "strings", "arrow", "int64")]
    run = dflow.distributed.AllReduce(dflow.connect()).run(program.step, iter(batches), steps=4)
    assert len([*run]) == 4

    def measure(batch: Any) -> Any:
        return program.table(batch["user"]).sum(-1)

    expected = np.mean([measure(batch) for batch in batches])
    found = dflow.evaluate(lambda batch: {"sum": measure(batch)}, batches)
    assert found["sum"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(dflow.InputError, match="evaluate: batch/user: expected a lookup of its strings"):
        dflow.evaluate(lambda batch: {"sum": batch["user"] + 1}, batches)
