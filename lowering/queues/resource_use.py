"""An op on a queue or an accumulator, run by the host: it is started, and a callback ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.queues.channel import Sent
from dflow.lowering.queues.pending_operations import Answer, Cancel, OnDone
from dflow.lowering.values.host_values import stays_on_host
from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S

#: The outcome of an op: its results, or the error.
Results = tuple[Sent, ...] | BaseException
OnResults = Callable[[Results], None]


@dataclass(frozen=True)
class ResourceUse:
    """An op of `ops.RESOURCE_OPS` without its operands; `where` is the user's line, which ends messages."""

    op: str
    count: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    cancel_pending: bool = False
    where: str = ""


class Held(Protocol):
    """A queue or an accumulator, as its store uses it."""

    def start(self, use: ResourceUse, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start an op; `on_results` is called once, from any thread. The returned function ends it with an error."""
        ...

    def forget(self, reason: str, remedy: str) -> None:
        """Free the contents. Pending operations and later uses get an error with this reason and remedy."""
        ...


def giving(on_results: OnResults, made: Callable[[tuple[Any, ...]], Sequence[Any]]) -> OnDone:
    """Return a callback that passes `made(answer)` to `on_results`, or the error of the answer or of `made`."""

    def results_of(answer: Answer) -> Results:
        if isinstance(answer, BaseException):
            return answer
        try:
            return tuple(made(answer))
        except Exception as error:
            return error

    def on_done(answer: Answer) -> None:
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
    copy: jax.Array = _copy(array) if isinstance(array, jax.Array) else jnp.array(array, copy=True)
    return copy


#: For a small array it takes a quarter of the time of `jnp.array`.
_copy = jax_jit(jnp.copy)


def nothing_to_cancel(error: BaseException) -> None:
    """Do nothing: the op has ended already."""
