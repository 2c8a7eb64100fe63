"""Asynchronous training: each worker reads, computes and applies at its own pace.

No worker waits for another. A worker's gradient is applied to the present values of the variables, which may be a few
updates newer than the values that it read (section 4.4 of the OSDI 2016 paper). Other workers do the steps that a lost
worker had claimed but not done.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from dflow.distributed.wire.messages import NotFinite
from dflow.tracing.errors import DflowError, StrategyError

_runs = itertools.count()


class StepSource(Protocol):
    """The part of a cluster that a strategy needs: it assigns the steps to workers."""

    def shared_step(self) -> AbstractContextManager[None]:
        """Return a context for running a step that other workers run too."""
        ...

    def claim(
        self,
        run: str,
        total_steps: int,
        *,
        done: int = 0,
        step_s: float = 0.0,
        metrics: Mapping[str, float] = {},
        more: bool = True,
        not_finite: NotFinite | None = None,
    ) -> range:
        """Report the last claim, and return the next steps to do; an empty range means that the run is complete.

        done        number of steps of the last claim that were done
        step_s      median time of these steps, in s
        metrics     numbers of the last step, to show as progress
        more        if False, return the steps that were not done to the pool, and get no steps
        not_finite  the first loss of the steps done that is not finite
        """
        ...


def refuse_negative(steps: int) -> None:
    """Raise StrategyError, with the user's line, for a negative number of steps."""
    if steps < 0:
        raise StrategyError(
            f"steps={steps} of a run is negative",
            "give 0 or more, of all workers together",
        )


class Async:
    """Runs a training step on every worker until all workers together have done a number of steps."""

    def __init__(self, cluster: StepSource) -> None:
        self._cluster = cluster

    def run(
        self, step: Callable[..., Any], batches: Iterable[Any], *, steps: int, name: str | None = None
    ) -> Iterator[Any]:
        """Call `step(*batch)` with this worker's own batches, and yield the result of each call.

        step     a `dflow.jit` function; a scalar or a dict of scalars that it returns is shown as its progress
        batches  tuples of arguments (any other value is passed as the only argument); when they end or the program
                 leaves the loop, the run ends for this worker, and the other workers do the remaining steps
        steps    number of steps of all workers together
        name     of the run, the same on every worker; by default, runs are numbered in the order of the program
        raises   StrategyError for a negative number of steps; VariableError when the optimizer of a step has variables
                 that are not on tasks, so that no other worker sees them
        """
        refuse_negative(steps)
        run = name or f"run_{next(_runs)}"
        supply = iter(batches)
        claimed = self._cluster.claim(run, steps)
        while claimed:
            times: list[float] = []
            losses: list[Mapping[str, Any]] = []
            outcome = None
            try:
                for batch in itertools.islice(supply, len(claimed)):
                    started = time.perf_counter()
                    with self._cluster.shared_step():
                        outcome = step(*batch) if isinstance(batch, tuple) else step(batch)
                    times.append(time.perf_counter() - started)
                    losses.append(_losses(outcome))
                    yield outcome
            except BaseException:
                # The loop was left, or a step or a batch failed: return the steps not done here to other workers.
                found = None
                with contextlib.suppress(Exception):  # reading a loss of a failed step raises
                    found = first_not_finite(claimed.start, losses)
                with contextlib.suppress(DflowError):
                    self._cluster.claim(run, steps, done=len(times), more=False, not_finite=found)
                raise
            claimed = self._cluster.claim(
                run,
                steps,
                done=len(times),
                step_s=statistics.median(times) if times else 0.0,
                metrics=real_scalars(outcome),
                more=len(times) == len(claimed),
                not_finite=first_not_finite(claimed.start, losses),
            )


def first_not_finite(first: int, losses: Iterable[Mapping[str, Any]]) -> NotFinite | None:
    """Return the first loss that is not finite, of consecutive steps from number `first` on; None if all are finite.

    losses   for each step, scalars by name; only names that end with `loss` are checked
    """
    for step, named in enumerate(losses, first):
        for name, value in named.items():
            if _is_loss(name) and not math.isfinite(number := float(value)):
                return NotFinite(step, name, number)
    return None


def _losses(outcome: Any) -> dict[str, Any]:
    """Return the losses among a step's results, which may not be computed yet."""
    named = outcome if isinstance(outcome, Mapping) else {"loss": outcome}
    return {str(key): value for key, value in named.items() if _is_loss(str(key)) and _is_real_scalar(value)}


def _is_loss(name: str) -> bool:
    return name.endswith("loss")


def real_scalars(outcome: Any) -> dict[str, float]:
    """Return the real scalars among a step's results, by name; a result that is one scalar is named `loss`."""
    named = outcome if isinstance(outcome, Mapping) else {"loss": outcome}
    return {str(key): float(value) for key, value in named.items() if _is_real_scalar(value)}


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    dtype = getattr(value, "dtype", None)
    # Every real dtype, even bfloat16 and 8-bit floats, casts to float64; complex ones do not, and random keys have no
    # NumPy dtype.
    return (
        getattr(value, "shape", None) == ()
        and isinstance(dtype, np.dtype)
        and np.can_cast(dtype, np.float64, "same_kind")
    )
