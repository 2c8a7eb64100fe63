"""Asynchronous training: each worker reads, computes and applies at its own pace.

No worker waits for another. A worker's gradient is applied to whatever the variables hold by then, which may be a few
updates newer than what it read (section 4.4 of the OSDI 2016 paper). A step that a lost worker had claimed and not
done is done by another.
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

from dflow.distributed.messages import NotFinite
from dflow.tracing.errors import DflowError, StrategyError
from dflow.tracing.source import at, caller

_runs = itertools.count()


class StepSource(Protocol):
    """What a strategy needs of a cluster: who does which steps."""

    def shared_step(self) -> AbstractContextManager[None]:
        """Run a step inside, which other workers do too."""
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
        """Report the last claim, and get the next steps to do; an empty range says that the run is complete.

        With `more` false it gives back what was not done, and gets no steps. `not_finite` is the first loss of the
        steps done that is not finite.
        """
        ...


def refuse_negative(steps: int) -> None:
    """Raise StrategyError, with the user's line, for a number of steps that cannot be."""
    if steps < 0:
        raise StrategyError(
            f"steps={steps} of a run is negative{at(caller())}\n  give 0 or more, of all workers together"
        )


class Async:
    """Runs a training step on every worker until the cluster has done a number of steps in all."""

    def __init__(self, cluster: StepSource) -> None:
        self._cluster = cluster

    def run(
        self, step: Callable[..., Any], batches: Iterable[Any], *, steps: int, name: str | None = None
    ) -> Iterator[Any]:
        """Call `step(*batch)` with this worker's own batches, and yield what each call returns.

        step     a `dflow.jit` function; a scalar or a dict of scalars that it returns is shown as its progress
        batches  tuples of arguments (anything else is passed as the one argument); the run ends early for this
                 worker when they end or the program leaves the loop, and the other workers do what is left
        steps    how many steps all workers do together
        name     of the run, the same on every worker; given none, runs are numbered in the order of the program
        raises   StrategyError for a negative number of steps; VariableError when the optimizer of a step has variables
                 that are not on tasks, which no other worker sees
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
                # The loop was left, or a step or a batch failed: the others shall not wait for what is not done here.
                found = None
                with contextlib.suppress(Exception):  # of a value that a step was to give and did not
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
    """The first loss that is not a finite number, of consecutive steps from number `first` on.

    losses   for each step, scalars by name; those whose names end with `loss` are looked at
    """
    for step, named in enumerate(losses, first):
        for name, value in named.items():
            if _is_loss(name) and not math.isfinite(number := float(value)):
                return NotFinite(step, name, number)
    return None


def _losses(outcome: Any) -> dict[str, Any]:
    """The losses that a step returned; they may not be computed yet."""
    named = outcome if isinstance(outcome, Mapping) else {"loss": outcome}
    return {str(key): value for key, value in named.items() if _is_loss(str(key)) and _is_real_scalar(value)}


def _is_loss(name: str) -> bool:
    return name.endswith("loss")


def real_scalars(outcome: Any) -> dict[str, float]:
    """The real numbers in what a step returned: a scalar counts as its loss."""
    named = outcome if isinstance(outcome, Mapping) else {"loss": outcome}
    return {str(key): float(value) for key, value in named.items() if _is_real_scalar(value)}


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    dtype = getattr(value, "dtype", None)
    # Every real dtype, bfloat16 and the 8-bit floats too, casts to float64; complex numbers do not, and keys are none.
    return (
        getattr(value, "shape", None) == ()
        and isinstance(dtype, np.dtype)
        and np.can_cast(dtype, np.float64, "same_kind")
    )
