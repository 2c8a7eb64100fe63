"""The contexts of the steps of a run that several workers do, each step once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from dflow.distributed.asynchronous.staleness_bound import SharedStep, StalenessBound
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.training.applying import shared_step
from dflow.distributed.training.compared_steps import ComparedSteps

LOGGER = logging.getLogger("dflow")


@contextmanager
def shared_steps(cluster: Cluster, run: str, rules: AheadRules, job: str, *, is_one_call: bool) -> Iterator[SharedStep]:
    """Return the context of a loop over steps of `run`, which other workers, if there can be any, run too.

    It gives the context of each step. Its first argument has the number of the step in the run, and the numbers of the
    loop's next steps as far as they are known; the second, if not None, the batches of the step and of the next one.
    State that a step changes on other tasks is changed once, however often the step is tried.

    rules        when steps begin on other tasks. With a bound of their staleness, a step's context waits until the step
                 may begin, and raises DeadlineExceeded
    job          the job of the task that counts the steps for that
    is_one_call  whether each step is one call of a function of `dflow.jit`, so that all workers call the same

    What the steps write is compared with what those of the other workers write; a context raises StrategyError if it
    differs.
    """
    if cluster.is_standalone:
        yield lambda steps, batches: nullcontext()
        return

    compared = cluster.part(ComparedSteps)
    on_new = partial(compared.compare_call, run, is_one_call=is_one_call)
    with cluster.steps.ahead(run, rules, LOGGER.warning, on_new) as loop:

        @contextmanager
        def step(steps: range, batches: tuple[Any, Any] | None) -> Iterator[None]:
            compared.refuse_unequal(run)
            with cluster.server.gate.step(cluster.steps.timeout_s), shared_step(), loop.iteration(steps, batches):
                yield

        if rules.max_staleness is None:
            yield step
            return
        with StalenessBound(cluster, run, rules.max_staleness, job, loop).taking_part(step) as bounded:
            yield bounded
