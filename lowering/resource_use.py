"""An op on a queue or an accumulator, as the host does it: started, and ended by a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit

from dflow.lowering.channel import Sent
from dflow.lowering.host_values import stays_on_host
from dflow.lowering.waiters import Answer, Cancel, OnDone
from dflow.tracing.queue_settings import DEFAULT_TIMEOUT_S

#: What an op ends with: its results, or the error.
Results = tuple[Sent, ...] | BaseException
OnResults = Callable[[Results], None]


@dataclass(frozen=True)
class ResourceUse:
    """An op of `ops.RESOURCE_OPS` without its operands; `where` is the user's line as messages end with it."""

    op: str
    count: int = 0
    timeout_s: float = DEFAULT_TIMEOUT_S
    cancel_pending: bool = False
    where: str = ""


class Held(Protocol):
    """A queue or an accumulator as its store holds it."""

    def start(self, use: ResourceUse, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        """Do an op; `on_results` is called once, from any thread. The result ends the wait for it with an error."""
        ...

    def forget(self, reason: str, remedy: str) -> None:
        """Let go of the contents: who uses it from now on, or waits, gets an error that says these two."""
        ...


def giving(on_results: OnResults, made: Callable[[tuple[Any, ...]], Sequence[Any]]) -> OnDone:
    """A callback that gives what is made of the answer; or the error, also that of making it."""

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
            # An interrupt of this thread is nothing to the one who waits.
            on_results(results_of(answer))
            raise
        on_results(results)

    return on_done


def copied(array: Any) -> Sent:
    """A copy, which nobody changes, and nobody takes away by donating the array somewhere."""
    if stays_on_host(array):
        return np.array(array)
    copy: jax.Array = _copy(array) if isinstance(array, jax.Array) else jnp.array(array, copy=True)
    return copy


#: A quarter of the time that `jnp.array` takes for a little array.
_copy = jax_jit(jnp.copy)


def nothing_to_cancel(error: BaseException) -> None:
    """What is done needs no cancelling."""
