"""Asynchronous training: each worker reads, computes and applies at its own pace.

No worker waits for another. A worker's gradient is applied to the present values of the variables, which may be a few
updates newer than the values that it read (section 4.4 of the OSDI 2016 paper). Other workers do the steps that a lost
worker had claimed but not done.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from msgspec.structs import replace

from dflow.distributed.strategies.step_report import first_not_finite, losses_of, real_scalars
from dflow.distributed.strategies.strategy import Strategy, StrategyCluster, arguments_of
from dflow.distributed.wire.messages.rounds import ClaimSteps
from dflow.tracing.errors import DflowError, StrategyError
from dflow.tracing.near_names import suggests_keywords


class Async(Strategy):
    """Runs a training step on every worker until all workers together have done `steps` steps.

    A worker's step reads the variables as soon as the worker's previous update is applied. So it costs one round trip
    of the network, where the same function called in a plain loop costs two.

    prefetch  number of the worker's own newest updates that a step may lack, at least 0. With 1, the values for a step
              are fetched while the previous step computes; its gradients are then one update older
              It has no effect, with a warning, on steps that call several functions with variables on other tasks,
              or one with branches or loops there
    raises    StrategyError for a negative `prefetch`
    """

    run_prefix = "run"

    @suggests_keywords
    def __init__(self, cluster: StrategyCluster, *, prefetch: int = 0) -> None:
        if prefetch < 0:
            raise StrategyError(f"Async: prefetch: expected at least 0, got {prefetch}")
        self._cluster, self._prefetch = cluster, prefetch

    def _results(self, run: str, step: Callable[..., Any], batches: Iterator[Any], steps: int) -> Iterator[Any]:
        with self._cluster.shared_steps(run, self._prefetch) as shared_step:
            yield from self._claimed(run, step, batches, steps, shared_step)

    def _claimed(
        self,
        run: str,
        step: Callable[..., Any],
        batches: Iterator[Any],
        steps: int,
        shared_step: Callable[[range], AbstractContextManager[None]],
    ) -> Iterator[Any]:
        ask, claim = self._cluster.coordinator.ask, ClaimSteps(run, self._cluster.task, steps)
        claimed = ask(claim).steps
        while claimed:
            times: list[float] = []
            losses: list[Mapping[str, Any]] = []
            outcome = None
            try:
                for number, batch in zip(claimed, batches, strict=False):
                    started = time.perf_counter()
                    with shared_step(range(number, claimed.stop)):
                        outcome = step(*arguments_of(batch))
                    times.append(time.perf_counter() - started)
                    losses.append(losses_of(outcome))
                    yield outcome
            except BaseException:
                # The loop was left, or a step or a batch failed: return the steps not done here to other workers.
                found = None
                with contextlib.suppress(Exception):  # reading a loss of a failed step raises
                    found = first_not_finite(claimed.start, losses)
                with contextlib.suppress(DflowError):
                    ask(replace(claim, done=len(times), more=False, not_finite=found))
                raise
            progress = replace(
                claim,
                done=len(times),
                step_s=statistics.median(times) if times else 0.0,
                metrics=real_scalars(outcome),
                more=len(times) == len(claimed),
                not_finite=first_not_finite(claimed.start, losses),
            )
            claimed = ask(progress).steps
