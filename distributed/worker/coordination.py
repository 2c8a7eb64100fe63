"""What the programs of a cluster ask its coordinator: elections, barriers, and results for the closing table."""

from __future__ import annotations

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.wire.messages.coordination import AwaitBarrier, ElectOnce
from dflow.distributed.wire.messages.status import Report
from dflow.tracing.near_names import suggests_keywords


class Coordinated:
    """A task whose program may ask the coordinator."""

    #: Its full name.
    task: str
    #: Sends messages to the coordinator.
    coordinator: CoordinatorClient

    def elect(self, what: str) -> bool:
        """Return whether this task is the one that does `what`: the first live task that asks."""
        return self.coordinator.ask(ElectOnce(what, self.task)).elected

    @suggests_keywords
    def barrier(self, name: str, *, timeout_s: float = 600.0, fails_on_leave: bool = False) -> tuple[str, ...]:
        """Wait until all members have come to the barrier `name`; return the tasks that passed it.

        Members are the tasks of this one's job that are live or expected at the first arrival. The barrier goes on
        without a member that leaves, or fails if any waiting task set `fails_on_leave`. A task that joins later is
        a member of the next generation.
        raises  DeadlineExceeded naming the missing tasks; TaskLost when the barrier has failed
        """
        arrival = AwaitBarrier(name, self.task, timeout_s=timeout_s, fails_on_leave=fails_on_leave)
        return self.coordinator.ask(arrival).members

    def report(self, name: str, value: float) -> None:
        """Add a result to the closing table of the run."""
        self.coordinator.ask(Report(name, float(value)))
