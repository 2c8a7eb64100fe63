"""Callbacks of a program in the loop of a `Trainer`; early stopping is one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.tracing.errors import TrainingError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller
from dflow.training.metric_direction import better, missing_metric, mode_of


class Callback:
    """Called by a `Trainer` on each worker, in the thread of the loop. Override the methods that you need.

    `steps` is the number of steps of the run that are done, by all workers. A method that returns a text ends the run,
    with the text as its reason, on all workers: where their loops end together after the same step, else when the step
    that each of them does has ended, or, if they have decided to go on, at the next evaluation or checkpoint.
    """

    def on_start(self, steps: int, cluster: Cluster) -> None:
        """The run begins, after `steps` steps of earlier programs; `cluster.task` is this worker."""

    def on_step(self, steps: int, outcome: Any) -> str | None:
        """A step of this worker has returned `outcome`, which may not be computed yet; reading it waits."""

    def on_metrics(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """About once a second: the means over this worker's newest results, at most 100 of them."""

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """An evaluation has ended; `metrics` are the result of `dflow.evaluate`, the same on all workers."""

    def on_end(self, steps: int, reason: str) -> None:
        """The run has ended without an error, or with its batches; `reason` is empty if all steps are done."""

    def state(self) -> Mapping[str, float]:
        """Return numbers by name that are kept in each checkpoint."""
        return {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the state from the checkpoint that the run goes on from."""


class EarlyStopping(Callback):
    """Ends the run when a metric of the evaluations has not become better for `patience` of them.

    metric     a name in the results of the evaluation
    patience   number of evaluations in a row without a better value that end the run
    mode       "min" or "max": whether a better value is smaller or larger. By default as the name says: "max" for names
               such as auc, accuracy, precision, recall, reward, return, f1 and score, "min" for losses and errors
    min_delta  least change that counts as better
    raises     TrainingError for other settings; and at the start of the run, or at the first evaluation of an iterator,
               for an evaluation without the metric, and without `mode` for a name that does not say which is better
    """

    @suggests_keywords
    def __init__(
        self, metric: str = "loss", *, patience: int = 3, mode: str | None = None, min_delta: float = 0.0
    ) -> None:
        mode = mode_of(metric) if mode is None else mode
        if mode not in ("min", "max", None):
            raise TrainingError(
                f"EarlyStopping: mode: expected 'min' or 'max', got {mode!r}", "give mode='min' for a loss", at=caller()
            )
        if patience < 1 or not min_delta >= 0:
            raise TrainingError(
                f"EarlyStopping: expected patience of at least 1 and min_delta of at least 0, got {patience} and "
                f"{min_delta}",
                "give patience=3",
                at=caller(),
            )
        self._mode = mode
        #: Name of the metric in the results of the evaluation.
        self.metric, self._patience, self._min_delta = metric, patience, min_delta
        self._sign = -1.0 if mode == "max" else 1.0
        self._loc = caller()
        #: The best value, None before the first evaluation, and the number of evaluations since then.
        self.best: float | None = None
        self.since = 0

    def on_evaluation(self, steps: int, metrics: Mapping[str, float]) -> str | None:
        """Return why the run ends, if the metric has not become better for long enough."""
        self.check(metrics)
        value = metrics[self.metric]
        best = math.inf if self.best is None else self._sign * self.best
        # Not a number is never better.
        if self._sign * value < best - self._min_delta:
            self.best, self.since = value, 0
        else:
            self.since += 1
        if self.since < self._patience:
            return None
        how = f"{better(str(self._mode))} (mode={self._mode!r})"
        return f"{self.metric} has not become better than {self.best} for {self.since} evaluations; {how}"

    def check(self, known: Iterable[str]) -> None:
        """Raise TrainingError if the metric is not among these, or if it is not known which values are better."""
        if self.metric not in known:
            raise TrainingError(*missing_metric("EarlyStopping", self.metric, known), at=self._loc)
        if self._mode is None:
            raise TrainingError(
                f"EarlyStopping: mode: expected 'min' or 'max' for {self.metric!r}, whose name does not say which "
                "values are better",
                "give mode='min' if smaller ones are, else mode='max'",
                at=self._loc,
            )

    def state(self) -> Mapping[str, float]:
        """Return the best value and the number of evaluations since then."""
        return {} if self.best is None else {"best": self.best, "since": self.since}

    def restore(self, state: Mapping[str, float]) -> None:
        """Set the best value and the number of evaluations since then."""
        if state:
            self.best, self.since = state["best"], int(state["since"])
