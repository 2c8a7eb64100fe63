"""The schedule's program with state: steps of `Async` change variables of all ps tasks, which are in snapshots.

A step changes the two variables of a ps task (`snapshot_variables.py`) by two calls. The steps, their claims and the
snapshots are run by the real code, as in `steps_program`; the changes are Python functions in place of XLA's programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.distributed.steps.steps_ahead import BegunStep, RegisteredStep
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.message import Notice
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.lowering.programs.program import Program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Call, Item, Plan, Read, Recv, Send
from dflow.tracing.errors import TaskLost
from tests.simulation.checks import Attempt, name_of
from tests.simulation.snapshot_checks import StepSnapshotChecks, names_on
from tests.simulation.snapshot_variables import SnapshotVariables
from tests.simulation.steps_program import StepsWorker
from tests.simulation.tasks import Member, SimulatedTasks, programs


class SnapshotsWorker(StepsWorker):
    """A worker that runs steps until the coordinator reports the run as complete, or lost state as lost for good."""

    def __init__(
        self,
        member: Member,
        tasks: SimulatedTasks,
        checks: StepSnapshotChecks,
        steps: int,
        ps: Sequence[str],
        max_staleness: int | None,
    ) -> None:
        self._length = steps + 1
        super().__init__(member, tasks, checks, steps, ps, max_staleness)
        self._state_checks = checks
        self._known: dict[str, int] = {}
        self._variables = SnapshotVariables(self, member, checks, self._length, self._forget)

    def _forget(self) -> None:
        self._loop.state_changed()
        self._known = {}

    # As a cluster.

    def unpaused(self) -> AbstractContextManager[None]:
        """Return a context that is entered while steps are not paused."""
        return self._variables.step()

    def placed(self, message: PlaceVariable) -> Placed:
        """Place something on a ps task; what was lost comes back with a snapshot, or never."""
        return self._variables.place(message)

    def await_recovery(self) -> None:
        """Wait until no state is lost. Raises TaskLost if lost state cannot be restored."""
        self._variables.await_recovery()

    def tell(self, message: Notice) -> None:
        """Report steps: in these schedules the strategy's time is simulated."""
        self._member.driver.tell(message)

    # The program.

    def run(self) -> None:
        """Run steps until the run is complete, or lost state cannot be restored several times in a row."""
        self._variables.train(self._train)
        self.is_complete = True

    def _place_on(self, host: str) -> None:
        """Place the variables of a ps task, and create them there unless they exist."""
        self._variables.create_on(host)

    def _run_parts(
        self, id: StepId, attempt: Attempt, called: RegisteredStep, others: Mapping[str, Peer], begun: BegunStep | None
    ) -> None:
        with self._variables.used.explained([*map(name_of, self._ps)]):
            super()._run_parts(id, attempt, called, others, begun)

    def _handle_on(self, host: str) -> int:
        """Return the handle of the ps's plan, which is registered again only after a return to a snapshot."""
        if host not in self._known:
            self._known[host] = self.retried(partial(self._registered_on, host))
        return self._known[host]

    def _registered_on(self, host: str) -> int:
        handle = super()._handle_on(host)
        if not handle:
            raise TaskLost(f"{host} is down")
        return handle

    def own_plan(self) -> tuple[Plan, list[Program]]:
        """Return this worker's part of a step; its feed is the attempt's number."""
        types = (("i32", (self._length,)),) * 2
        items: list[Item] = []
        for place, host in enumerate(self._ps):
            gives = (1 + 2 * place, 2 + 2 * place)
            items.append(Recv(_edge("values", host), name_of(host), gives, types))
        made = 1 + 2 * len(self._ps)
        items.append(Call(0, (), (), tuple(range(made)), (made,)))
        for host in self._ps:
            items += [Send(_edge(what, host), name_of(host), (made,)) for what in ("first", "second")]
        return Plan(self.task, made + 1, tuple(items), feeds=(0,)), programs(self._computed)

    def _computed(self, number: Any, *values: Any) -> tuple[Any]:
        names = [name for host in self._ps for name in names_on(host)]
        for name, value in zip(names, values, strict=True):
            self._state_checks.read(str(self._member.process), name, np.asarray(value))
        return (number,)

    def plan_of(self, host: str, member: Member) -> tuple[Plan, list[Program]]:
        """Return a ps task's part of a step: it sends its variables, and changes each by a separate update."""
        names = names_on(host)
        items: list[Item] = [Read(names, (0, 1)), Send(_edge("values", host), self.task, (0, 1))]
        changes = []
        for index, (what, name) in enumerate(zip(("first", "second"), names, strict=True)):
            items.append(Recv(_edge(what, host), self.task, (2 + index,), (("i32", ()),)))
            items.append(Call(index, (name,), (), (2 + index,), ()))
            changes.append(Program(partial(self._change, member, name)))
        return Plan(name_of(host), 4, tuple(items)), changes

    def _change(
        self, member: Member, name: str, written: Sequence[Any], read: Sequence[Any], number: Any
    ) -> tuple[list[Any], list[Any]]:
        value = np.array(written[0])
        attempt = self._state_checks.changes(str(member.process), name, value, int(np.asarray(number)))
        value[attempt.step] += 1
        member.say(f"applies step {attempt.step} of {attempt.worker} to {name!r}")
        return [jnp.asarray(value)], []


def _edge(what: str, host: str) -> str:
    return f"{what} of {host}"
