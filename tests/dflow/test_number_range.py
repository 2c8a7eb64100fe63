"""Numbers of NumPy and Python beyond the 32 bits that JAX keeps: an error for integers and a warning for floats.

JAX alone would cut an integer, and so read another row of a table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster

BIG = 2**32 + 5
IDS = np.array([1, BIG])
ROWS = np.full((2, 2), BIG)
SPEC = {"n": jax.ShapeDtypeStruct((2,), jnp.int32)}


class Made:
    """The state of the cases."""

    def __init__(self) -> None:
        self.v = dflow.Variable(jnp.zeros((2, 2), jnp.int32), name="v")
        self.shards = dflow.ShardedVariable(jnp.zeros((2, 2), jnp.int32), shards=2, name="shards")
        self.queue = dflow.FIFOQueue(2, SPEC, name="queue")
        self.sums = dflow.ConditionalAccumulator(SPEC, reduction="sum", name="sums")


def identity(ids: Any, *, more: Any = None) -> Any:
    return ids, more


def eagerly(ids: Any) -> Any:
    with dflow.eager():
        return dflow.jit(identity)(ids)


WAYS: dict[str, tuple[Callable[[Made], Any], str]] = {
    "argument": (lambda made: dflow.jit(identity)(IDS), r"argument 'ids': .* got 4294967301 at \(1,\)"),
    "dict": (lambda made: dflow.jit(identity)({"a": [IDS]}), r"argument 'ids/a/0'"),
    "keyword": (lambda made: dflow.jit(identity)(1, more=(IDS,)), r"argument 'more/0'"),
    "scalar": (lambda made: dflow.jit(identity)(np.uint64(BIG)), r"0 to 4294967295, .* got 4294967301\n"),
    "negative": (lambda made: dflow.jit(identity)(-np.array([[0, BIG]])), r"got -4294967301 at \(0, 1\)"),
    "remainder": (lambda made: dflow.jit(lambda ids: made.v[ids % 2])(IDS), r"argument 'ids'"),
    "nested": (lambda made: dflow.jit(lambda: dflow.jit(identity)(IDS))(), r"argument 'ids'"),
    "method": (lambda made: dflow.jit(lambda self, ids: ids, static_argnums=0)(made, IDS), r"argument 'ids'"),
    "eager": (lambda made: eagerly(IDS), r"argument 'ids'"),
    "compiled": (
        lambda made: dflow.jit(lambda x: made.v + x).lower(jnp.zeros(2, jnp.int32)).compile()(IDS),
        r"argument 'args/0'",
    ),
    "assign": (lambda made: made.v.assign(ROWS), r"assign of variable 'v': .*\(0, 0\), and 3 more"),
    "gather": (lambda made: made.v.gather(IDS), r"gather of variable 'v': indices"),
    "index": (lambda made: made.v[IDS], r"gather of variable 'v': indices"),
    "scatter": (lambda made: made.v.scatter_add(np.array([0, 1]), ROWS), r"scatter_add of variable 'v'"),
    "operator": (lambda made: made.v + IDS, "an operand of a variable"),
    "reflected": (lambda made: IDS * made.v, "an operand of a variable"),
    "initial": (lambda made: dflow.Variable(IDS, name="new"), "the initial value of variable 'new'"),
    "shards": (lambda made: made.shards.assign(ROWS), "assign of sharded variable 'shards'"),
    "shard rows": (lambda made: made.shards.scatter_add([0, 1], ROWS), "scatter_add of sharded variable 'shards'"),
    "enqueue": (lambda made: made.queue.enqueue({"n": IDS}), "enqueue of queue 'queue': element/n"),
    "enqueue_many": (lambda made: made.queue.enqueue_many({"n": ROWS}), "enqueue_many of queue 'queue': element/n"),
    "derivative": (
        lambda made: dflow.grad(lambda x, ids: x * ids.sum())(1.0, {"ids": IDS}["ids"]),
        r"grad: argument/1: .* got 4294967301 at \(1,\)",
    ),
    "evaluation": (lambda made: dflow.evaluate(lambda b: b["x"].mean(), [{"x": IDS}]), "evaluate: batch/x"),
    "accumulator": (lambda made: made.sums.apply({"n": IDS}), "a gradient of accumulator 'sums' at 'n'"),
    "int": (lambda made: dflow.jit(identity)(BIG), r"argument 'ids': .* Python's int, got 4294967301\n"),
    "int of state": (lambda made: dflow.jit(lambda ids: made.v + ids)(BIG), r"argument 'ids': .* got 4294967301\n"),
    "negative int": (lambda made: dflow.jit(identity)(-(2**31) - 1), r"got -2147483649\n"),
    "int of 70 bits": (lambda made: dflow.jit(identity)({"a": [1, 2**70]}), r"argument 'ids/a/1'"),
    "int by keyword": (lambda made: dflow.jit(identity)(1, more=BIG), r"argument 'more'"),
    "int, nested": (lambda made: dflow.jit(lambda: dflow.jit(identity)(BIG))(), r"argument 'ids'"),
    "int, eager": (lambda made: eagerly(BIG), r"argument 'ids'"),
    "int, lowered": (lambda made: dflow.jit(identity).lower(BIG), r"argument 'ids'"),
    "int, shape": (lambda made: dflow.jit(identity).eval_shape(BIG), r"argument 'ids'"),
    "list assigned": (lambda made: made.v.assign([[0, 1], [2, BIG]]), r"assign of .* got 4294967301 at \(1, 1\)"),
    "list of arrays": (lambda made: made.v.assign([IDS, IDS]), r"assign of .* got 4294967301 at \(0, 1\)"),
    "int added": (lambda made: made.v.assign_add(BIG), r"assign_add of variable 'v'"),
    "int index": (lambda made: made.v[BIG], r"index of variable 'v'"),
    "list index": (lambda made: made.v.gather([0, BIG]), r"gather of variable 'v': indices: .* at \(1,\)"),
    "int operand": (lambda made: dflow.jit(lambda: made.v + BIG)(), "an operand of a variable"),
    "list initial": (lambda made: dflow.Variable([BIG], name="new"), "the initial value of variable 'new'"),
    "int initial": (lambda made: dflow.Variable(BIG, name="new", dtype=jnp.int32), "the initial value of variable"),
    "shards, list": (lambda made: made.shards.scatter_add([0], [[1, BIG]]), "scatter_add of .* at \\(0, 1\\)"),
    "list enqueued": (lambda made: made.queue.enqueue({"n": [1, BIG]}), "enqueue of queue 'queue': element/n/1"),
    "int accumulated": (lambda made: dflow.ConditionalAccumulator(1, reduction="sum").apply(BIG), "a gradient of acc"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_integer_that_jax_would_change_is_an_error(way: str) -> None:
    call, message = WAYS[way]
    with pytest.raises(dflow.NumberRangeError, match=message) as caught:
        call(Made())
    assert isinstance(caught.value, dflow.InputError)
    assert isinstance(caught.value, OverflowError)  # which JAX raises for Python's
    assert "test_number_range.py:" in str(caught.value)


def test_the_call_is_checked_after_calls_with_other_arrays_of_the_same_type() -> None:
    table = dflow.Embedding(10, 2, name="table")
    for step in (dflow.jit(table), dflow.jit(lambda ids: ids + 1)):
        step(jnp.array([1, 2]))
        step(np.array([1, 2]))
        step(np.array([1, 2], np.int32))
        with pytest.raises(dflow.InputError, match="argument 'ids'"):
            step(IDS)


def test_ids_are_checked_where_the_table_lies_on_tasks() -> None:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table = dflow.Embedding(10, 2, name="table")
        with pytest.raises(dflow.InputError, match=r"argument 'batch/ids': .* got 4294967301 at \(1,\)"):
            dflow.jit(lambda batch: table(batch["ids"] % 10))({"ids": IDS})


def test_numbers_that_fit_pass() -> None:
    limits = np.array([-(2**31), 2**31 - 1])
    np.testing.assert_array_equal(dflow.jit(lambda x: x)(limits), limits)
    np.testing.assert_array_equal(dflow.jit(lambda x: x)(np.array([0, 2**32 - 1], np.uint64)), [0, 2**32 - 1])
    assert dflow.jit(lambda x, n: x + n % 7, static_argnums=1)(1, np.int64(2**40)) == 1 + 2**40 % 7
    assert dflow.jit(lambda x: x)(np.zeros((0,), np.int64)).shape == (0,)
    np.testing.assert_array_equal(dflow.jit(lambda x: x)(np.array([np.inf, np.nan, 1e-300])), [np.inf, np.nan, 0])
    for value in (2**32 - 1, [2**32 - 1]):
        np.testing.assert_array_equal(dflow.Variable(value, dtype=jnp.uint32).read(), value)
    np.testing.assert_array_equal(dflow.Variable(BIG, dtype=jnp.float32).read(), np.float32(BIG))
    assert dflow.grad(lambda x, n: x * (n % 7))(1.0, BIG) == BIG % 7  # a number of Python stays one


def test_a_constant_in_the_function_that_jax_refuses_has_a_remedy() -> None:
    with pytest.raises(OverflowError) as caught:
        dflow.jit(lambda x: x + 2**40)(1)
    assert any("write a float" in note for note in caught.value.__notes__)


def test_numbers_of_64_bits_pass_where_jax_keeps_them() -> None:
    with jax.enable_x64(True):
        np.testing.assert_array_equal(dflow.jit(lambda x: x + 1)(IDS), IDS + 1)
        assert dflow.jit(lambda x: x * 2)(np.float64(1e300)) == 2e300


@pytest.mark.parametrize("value", [np.array([0.0, 1e39]), np.array([0, 1e39j]), [1.0, np.float64(-1e300)]])
def test_a_float_that_becomes_an_infinity_is_a_warning(value: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dflow.jit(lambda x: x)(value)
    [mine] = [one for one in caught if one.category is dflow.NumberRangeWarning]
    assert mine.filename == __file__
    assert "argument 'x" in str(mine.message)
    assert "becomes inf" in str(mine.message)
