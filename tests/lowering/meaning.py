"""Compare passes with the reference rules: a graph gives the same outputs and leaves the same state after a pass."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import HANDLES, AccumulatorType, QueueType, RefType
from tests.reference.accumulator_model import AccumulatorModel
from tests.reference.interpret import Choose, interpret
from tests.reference.queue_model import QueueModel

WORKER, PS_0, PS_1 = "/job:worker/task:0", "/job:ps/task:0", "/job:ps/task:1"
TASKS = (WORKER, PS_0, PS_1)
#: The devices of the worker, the default one first.
DEVICES = ("cpu:0", "cpu:1", "cpu:2")
#: Devices that a program may name for an op.
PLACES = (*TASKS, *(f"/device:{device}" for device in DEVICES))


def inputs_of(graph: Graph) -> list[Any]:
    """A different value for each array argument of a graph."""
    arrays: list[Any] = [value.type for value in graph.inputs if not isinstance(value.type, HANDLES)]
    return [jnp.full(type.shape, 2 + index, type.dtype) for index, type in enumerate(arrays)]


def state_of(graph: Graph) -> dict[str, Any]:
    """A different value for each variable of a graph, by its name; an empty model of each queue and accumulator."""
    return {ref.name: _initial(10 * (1 + index), ref.type) for index, ref in enumerate(graph.refs)}


def _initial(value: int, held: Any) -> Any:
    match held:
        case RefType(of):
            return jnp.full(of.shape, value, of.dtype)
        case QueueType():
            return QueueModel(QueueSettings(QueueKind.FIFO, 8))
        case AccumulatorType():
            return AccumulatorModel(held, AccumulatorSettings(Reduction.MEAN))


def assert_equal_values(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Assert equal arrays, bit by bit."""
    assert [np.asarray(value).tolist() for value in one] == [np.asarray(value).tolist() for value in other]


def assert_equal_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Assert the same variables with equal values."""
    assert sorted(one) == sorted(other)
    assert_equal_values(*([_numbers(state[name]) for name in sorted(one)] for state in (one, other)))


def _numbers(held: Any) -> Any:
    """Return the content of a model, or the value of a variable."""
    match held:
        case QueueModel():
            return len(held.elements)
        case AccumulatorModel():
            return [held.step, held.dropped, len(held.gradients)]
    return held


def assert_same_meaning(
    before: Graph,
    after: Graph,
    inputs: Sequence[Any] | None = None,
    state: Mapping[str, Any] | None = None,
    choose: Choose | None = None,
) -> None:
    """Assert that `after` has the outputs and the final state of `before`; `choose`, if given, orders its nodes."""
    inputs = inputs_of(before) if inputs is None else inputs
    state = state_of(before) if state is None else state
    outputs, end = interpret(before, inputs, state)
    given, left = interpret(after, inputs, state, choose)
    assert_equal_values(given, outputs)
    assert_equal_states(left, end)


def chooser(seed: int) -> Choose:
    """Run the nodes of a graph in a random order that operands and order edges allow."""
    return random.Random(seed).choice
