"""The standalone cluster: `dflow.connect()` returns it when no cluster was configured.

It has the methods of `Cluster`, so that a script is the same in one process and in many.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from dflow.distributed.wire.messages.roster import EdgeTraffic
from dflow.distributed.wire.messages.status import GetStatus
from dflow.distributed.worker.coordination import Coordinated
from dflow.distributed.worker.own_coordinator import OwnCoordinator
from dflow.lowering.pipeline import ALONE


class Alone(Coordinated):
    """This process as the only task."""

    task = ALONE
    index = 0

    def __init__(self) -> None:
        self.coordinator = OwnCoordinator(self.task)

    @property
    def results(self) -> dict[str, float]:
        """The reported results, by name."""
        return self.coordinator.ask(GetStatus()).results

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

    def traffic(self) -> tuple[EdgeTraffic, ...]:
        """Values that this task has sent to others: none."""
        return ()

    @contextmanager
    def parameter_servers(self, job: str = "ps") -> Iterator[None]:
        """Do nothing: variables made inside live in this process, whatever the job."""
        yield

    def close(self) -> None:
        """Do nothing."""
