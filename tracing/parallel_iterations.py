"""Number of iterations of a loop with queue ops that may run concurrently."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jax.experimental.xla_metadata import set_xla_metadata

from dflow.tracing.errors import GraphTypeError

#: The key under which the number travels in JAX's trace context.
PARALLEL_KEY = "dflow_parallel_iterations"

#: The default.
DEFAULT_PARALLEL_ITERATIONS = 10


@contextmanager
def parallel_iterations(count: int) -> Iterator[None]:
    """Let at most `count` iterations of the loops traced inside run concurrently; the default is 10.

    For loops with queues or accumulators in them. Ops of an iteration that need neither results nor state of earlier
    iterations run before these have ended. With 1, an iteration starts when the one before has ended.

    raises  GraphTypeError for a `count` that is no positive integer
    """
    if type(count) is not int or count < 1:
        raise GraphTypeError(
            f"parallel_iterations: expected a positive integer, got {count!r}",
            "give 1 to start each iteration when the one before has ended",
        )
    with set_xla_metadata(**{PARALLEL_KEY: str(count)}):
        yield
