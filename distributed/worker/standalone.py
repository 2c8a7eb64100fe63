"""The standalone cluster: `dflow.connect()` returns it when no cluster was configured.

It has the methods of `Cluster`, so that a script is the same in one process and in many.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from dflow.distributed.coordinator.step_ledger import StepLedger, StepsAsked
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages import Claimed, ClaimSteps, EdgeTraffic, Failure, NotFinite, RoundsDone
from dflow.lowering.pipeline import ALONE
from dflow.tracing.devices.task_name import short_task_name

LOGGER = logging.getLogger("dflow")


class Alone:
    """This process as the only task."""

    task = ALONE
    index = 0

    def __init__(self) -> None:
        self._ledger = StepLedger()
        self._claims = itertools.count(1)
        self._last_claims: dict[str, int] = {}
        #: Reported results, by name.
        self.results: dict[str, float] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The live tasks: this one."""
        return (self.task,)

    def colleagues(self) -> tuple[tuple[str, ...], int]:
        """Return the tasks of this task's job, and their number: this one."""
        return (self.task,), 1

    def shared_step(self) -> AbstractContextManager[None]:
        """Run a step inside; here no other worker takes part in it."""
        return nullcontext()

    def take_part(self, run: str, job: str) -> None:
        """Return None: there is no run to take part in, since every step is a round of one worker."""

    def tell_rounds(self, report: RoundsDone) -> None:
        """Do nothing: no status of a cluster is kept."""

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Values that this task has sent to others: none."""
        return ()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Do nothing: variables made inside live in this process, whatever the job."""
        yield

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
        """Report the last claimed steps and get the next, as from a cluster; a later call resumes a run.

        Raises RemoteError when the run has another number of steps.
        """
        number, last = next(self._claims), self._last_claims.get(run, 0)
        claim = ClaimSteps(run, self.task, total_steps, number, last, done, step_s, dict(metrics), more, not_finite)
        [reply] = self._ledger.handle(StepsAsked(number, claim))
        for news in self._ledger.take_news():
            LOGGER.warning("%s", news)
        if isinstance(reply.message, Failure):
            raise error_of(reply.message, short_task_name(self.task))
        assert isinstance(reply.message, Claimed)
        self._last_claims[run] = number
        return range(reply.message.first, reply.message.first + reply.message.count)

    def elect(self, what: str) -> bool:
        """Return True: there is no other task."""
        return True

    def barrier(self, name: str, *, timeout_s: float = 600.0, fails_on_leave: bool = False) -> tuple[str, ...]:
        """Pass immediately: there is no other task."""
        return (self.task,)

    def report(self, name: str, value: float) -> None:
        """Keep a result."""
        self.results[name] = float(value)

    def close(self) -> None:
        """Do nothing."""
