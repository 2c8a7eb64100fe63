"""The numbers of a step that are shown as progress, its losses that are not finite, and a worker's reports of them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.training.metric_states import computed, named_results, on_host, states
from dflow.distributed.training.work_messages import RoundsDone
from dflow.distributed.wire.messages.status import NotFinite

#: Least time between two reports of a worker's steps before the end of the run, in s.
REPORT_S = 0.25


class StepProgress:
    """Reports a worker's steps in a run of `total` steps to the coordinator.

    done  initial number of steps done
    """

    def __init__(self, cluster: Cluster, run: str, total: int, done: int = 0) -> None:
        self._cluster, self._news = cluster, RoundsDone(run, cluster.task, done, total, 0)
        #: The numbers and losses of the steps since the last report.
        self._losses: list[tuple[int, Mapping[str, Any]]] = []
        self._outcome: Any = None
        self._told_s = time.monotonic()
        self.begin(done)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self._news.rounds == self._news.total_rounds

    def begin(self, done: int = 0) -> None:
        """Set the number of steps done, when they begin, or begin again after a return to a snapshot."""
        # Steps before a later return to a snapshot are not counted.
        self._news = replace(self._news, rounds=done, undone=self._cluster.steps.undone)

    def reached(self, done: int) -> None:
        """Set the number of steps done, for the next report."""
        self._news = replace(self._news, rounds=done)

    def note(self, number: int, outcome: Any, *, step_s: float = 0.0, is_dropped: bool = False) -> None:
        """Record that the worker's step `number` has ended; call `report` if the run is over or `REPORT_S` have passed.

        outcome     result of the step, which may not be computed yet
        step_s      duration of the step; by default the mean since the last report
        is_dropped  whether its gradient came too late for its round
        """
        news, self._outcome = self._news, outcome
        self._news = replace(news, steps=news.steps + 1, dropped=news.dropped + is_dropped, step_s=step_s)
        self._losses.append((number, losses_of(outcome)))
        if self.is_over or time.monotonic() - self._told_s > REPORT_S:
            self.report()

    def report(self) -> None:
        """Wait until the losses since the last report are computed, and report the steps to the coordinator."""
        news, found = self._news, first_not_finite(self._losses)
        metrics = real_metrics(self._outcome)
        mean_s = (time.monotonic() - self._told_s) / news.steps if news.steps else 0.0
        self._tell(replace(news, step_s=news.step_s or mean_s, metrics=metrics, not_finite=found))

    def report_failure(self) -> None:
        """Report the steps since the last report immediately, without their results, which may never be computed."""
        self._tell(self._news)

    def _tell(self, news: RoundsDone) -> None:
        self._cluster.coordinator.tell(news)
        self._news = replace(self._news, steps=0, dropped=0)
        self._told_s, self._losses = time.monotonic(), []


def first_not_finite(losses: Iterable[tuple[int, Mapping[str, Any]]]) -> NotFinite | None:
    """Return the first loss that is not finite; None if all are finite. Waits until they are computed.

    losses   numbers of steps, each with scalars by name; only names that end with `loss` are checked
    """
    for step, named in losses:
        for name, value in named.items():
            if name.endswith("loss") and not math.isfinite(number := float(value)):
                return NotFinite(step, name, number)
    return None


def losses_of(outcome: Any) -> dict[str, Any]:
    """Return the scalars of a step's result whose names end with `loss`, by name; they may not be computed yet."""
    return {name: value for name, value in scalars(outcome) if name.endswith("loss")}


def real_scalars(outcome: Any) -> dict[str, float]:
    """Return the real scalars of a step's result by name, see `scalars`; waits until they are computed."""
    return {name: float(value) for name, value in scalars(outcome)}


def real_metrics(outcome: Any) -> dict[str, float]:
    """Return the real scalars of a step's result, and the values of its states of metrics, by name; waits for them."""
    values = (computed(name, on_host(state)) for name, state in states(outcome).items())
    return real_scalars(outcome) | {name: number for found in values for name, number in found.items()}


def scalars(outcome: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each real scalar in a step's result. A result that is no mapping is named `loss`.

    Values may be arrays that are not computed yet.
    """
    return ((str(name), value) for name, value in named_results(outcome).items() if _is_real_scalar(value))


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return getattr(value, "shape", None) == () and _is_real(getattr(value, "dtype", None))


@functools.cache  # the strategies ask for each step
def _is_real(dtype: Any) -> bool:
    # Every real dtype, even bfloat16 and 8-bit floats, casts to float64; complex ones do not, and random keys have no
    # NumPy dtype.
    return isinstance(dtype, np.dtype) and np.can_cast(dtype, np.float64, "same_kind")
