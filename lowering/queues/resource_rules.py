"""Parts of the rules that run the ops on queues and accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import Cancel, Found, OnDone, OnResults, Results, Rule
from dflow.lowering.values.host_values import device_copy, stays_on_host
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.ir.resource_op import ResourceOp


def immediate(act: Callable[[Any, ResourceOp, Sequence[Any]], Sequence[Any]]) -> Rule:
    """Return the rule of an op that never waits; `act` returns its results."""

    def start(resource: Any, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        on_results(tuple(act(resource, op, operands)))
        return lambda error: None  # the op has ended, so that there is nothing to cancel

    return start


def property_of(read: Callable[[Any], Any], dtype: Any) -> Rule:
    """Return the rule of an op that gives a number of the resource's state machine, as it is now."""

    def act(resource: Any, op: ResourceOp, operands: Sequence[Any]) -> Sequence[Any]:
        return (np.asarray(resource.with_machine(read, op.line), dtype),)

    return immediate(act)


def giving(on_results: OnResults, made: Callable[[tuple[Any, ...]], Sequence[Any]]) -> OnDone:
    """Return a callback that passes `made(answer)` to `on_results`, or the error of the answer or of `made`."""

    def results_of(answer: Outcome[Found]) -> Outcome[Results]:
        if isinstance(answer, BaseException):
            return answer
        try:
            return tuple(made(answer))
        except Exception as error:
            return error

    def on_done(answer: Outcome[Found]) -> None:
        try:
            results = results_of(answer)
        except BaseException:
            # An interrupt of this thread must not leave the op unanswered.
            on_results(results_of(answer))
            raise
        on_results(results)

    return on_done


def copied(array: Any) -> Sent:
    """Return a copy, which a later change or donation of the caller's array does not affect."""
    if stays_on_host(array):
        return np.array(array)
    copy: jax.Array = device_copy(array) if isinstance(array, jax.Array) else jnp.array(array, copy=True)
    return copy
