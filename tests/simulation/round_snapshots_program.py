"""The schedule's program of synchronous training with state: rounds of `Sync` change variables, which are in snapshots.

The update of a round changes the two variables of a ps task (`snapshot_variables.py`), and an accumulator that is in
snapshots too. Rounds, pauses and returns are run by the real code.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from msgspec.structs import replace

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.synchronous.sync import Sync
from dflow.distributed.wire.messages.message import Notice
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.resources import CreateResource
from dflow.lowering.programs.program import Program
from dflow.lowering.steps.plan import Call, Scalar, UseResource
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.resource_op import ResourceOp
from tests.simulation.checks import name_of
from tests.simulation.round_checks import RoundChecks
from tests.simulation.round_snapshot_checks import RoundSnapshotChecks, tally_on
from tests.simulation.rounds_program import REQUEST_S, Changes, RoundsWorker, SimulatedSync
from tests.simulation.snapshot_checks import names_on
from tests.simulation.snapshot_variables import SnapshotVariables
from tests.simulation.steps_program import RUN
from tests.simulation.tasks import Member, SimulatedTasks, programs

#: Part of the steps after which a worker does something else for a while, the longest time that this takes, and the
#: part of these after which it leaves its loop and runs it again.
BUSY, BUSY_S, LEAVES = 0.1, 8.0, 0.5


class RoundSnapshotsWorker(RoundsWorker):
    """A worker that takes part in the run until it is complete, its batches have ended, or lost state stays lost."""

    def __init__(
        self,
        member: Member,
        tasks: SimulatedTasks,
        checks: RoundChecks,
        state_checks: RoundSnapshotChecks,
        ps: Sequence[str],
        rounds: int,
        workers: int,
        backups: int,
        data: int,
        seed: int,
    ) -> None:
        super().__init__(member, tasks, checks, ps, rounds, workers, backups, data)
        self._state_checks, self._length = state_checks, rounds + 1
        self._variables = SnapshotVariables(self, member, state_checks, self._length)
        self._tasks_used = [*map(name_of, ps)]
        self._draw = random.Random(f"{member.process} {seed}")

    def run(self) -> None:
        """Take part in the run until it is complete, or lost state cannot be restored several times in a row."""
        self._variables.train(self._train)
        self.is_complete = True

    def _train(self) -> None:
        for host in self._ps:
            self._variables.create_on(host)
            settings = AccumulatorSettings(Reduction.SUM)
            self._create(host, CreateResource(tally_on(host), f"accumulator<i32[{self._length}]>", settings))
        sync = SimulatedSync(cast(Cluster, self), backup_workers=self._backups)
        while not self._runs_to_the_end(sync):
            self._member.say("has left its loop, and runs it again")
        if operator.length_hint(self._batches):
            self._state_checks.complete(self.task)

    def _runs_to_the_end(self, sync: Sync) -> bool:
        """Run the loop; return whether it has ended, and was not left."""
        rounds = sync.run(self._compute, self._batches, steps=self._rounds, name=RUN)
        # Closed here, so that the end of the process in this loop is no error that Python reports.
        with closing(cast(Generator[Any], rounds)):
            for _ in rounds:
                if self._draw.random() < BUSY:
                    self._member.sleep(self._draw.random() * BUSY_S)
                    if self._draw.random() < LEAVES:
                        return False
        return True

    def _create(self, host: str, made: CreateResource) -> None:
        request = PlaceVariable(
            made.name, made.handle, (), 0, "ps", kind="accumulator", on=name_of(host), is_saved=made.is_saved
        )
        unsaved = self._variables.unsaved
        epoch, placed = unsaved.epoch, self._variables.place(request)
        with self._variables.used.explained([placed.task]):
            self._member.ask(host, replace(made, process=placed.process), timeout_s=REQUEST_S)
        if placed.is_saved:
            unsaved.note(made.name, epoch, (host, made), self._create_again)

    def _create_again(self, freed: Sequence[tuple[str, CreateResource]]) -> None:
        for host, made in freed:
            self._create(host, made)

    # As a cluster.

    def await_recovery(self) -> None:
        """Wait until no state is lost. Raises TaskLost if lost state cannot be restored."""
        self._variables.await_recovery()

    def tell(self, message: Notice) -> None:
        """Report rounds: in these schedules the strategy's time is simulated."""
        self._member.driver.tell(message)

    def take_part(self, run: str) -> RoundsWorker:
        """Return this worker, as its part in the run, once the run's host is not lost."""
        place = PlaceVariable(f"{run}/rounds", "", (), 0, "ps", kind="run", on=name_of(self._host), is_saved=False)
        self.retried(lambda: self._member.ask_coordinator(place))
        return super().take_part(run)

    # As its part in the run.

    def open(self, step: Callable[..., Any], batch: Any, steps: int, wanted: int) -> RoundsWorker | None:
        """Open the run, or join it if it is open; return None if it is complete."""
        self._variables.unsaved.make_again()
        with self._variables.used.explained(self._tasks_used):
            return super().open(step, batch, steps, wanted)

    def next(self, done: int) -> RoundOpen:
        """Wait for the opening after number `done`."""
        self._variables.unsaved.make_again()
        with self._variables.used.explained(self._tasks_used):
            return super().next(done)

    def run_step(
        self, gradients: RoundsWorker, step: Callable[..., Any], batch: int, opening: RoundOpen
    ) -> tuple[Any, bool]:
        """Run the step for an opening, while no state is captured or restored."""
        with self._variables.step(), self._variables.used.explained(self._tasks_used):
            return super().run_step(gradients, step, batch, opening)

    def seen_as(self) -> str:
        """Return the name of the run since the last return."""
        return self._accumulator.partition(" ")[0]

    def rounds_done(self) -> int:
        """Return the number of rounds done when the run is opened first after a return."""
        return self._state_checks.rounds_done()

    def create(self, host: str, made: CreateResource) -> None:
        """Create an accumulator on a host unless it exists; if the host is lost, after a return."""
        self.retried(partial(self._create, host, replace(made, is_saved=False)))

    def changes(self, host: str, unused: int) -> Changes:
        """Return the items with which a host applies the sum in register 0; registers from `unused` on are free."""
        member, recorded = self._tasks.member(host), super().changes(host, unused)
        assert member is not None
        names, first = names_on(host), len(recorded.items)
        changed = [Call(first + at, (name,), (), (0,), ()) for at, name in enumerate(names)]
        rounds, zero, is_fresh = range(unused, unused + 3)
        found = Call(first + len(names), (), (), (0,), (rounds,))
        tallied = UseResource(tally_on(host), ResourceOp(ops.accumulator_apply.name), (rounds, zero), (is_fresh,))
        return Changes(
            (*recorded.items, *changed, found, tallied),
            [
                *recorded.programs,
                *(Program(partial(self._change, member, name)) for name in names),
                *programs(self._round_vector),
            ],
            (Scalar(zero, "i32", np.int32(0).tobytes()),),
        )

    def _change(
        self, member: Member, name: str, written: Sequence[Any], read: Sequence[Any], total: Any
    ) -> tuple[list[Any], list[Any]]:
        value, rounds = np.array(written[0]), self._checks.rounds_in(total)
        round_ = self._state_checks.changes(str(member.process), name, value, rounds)
        value[round_] += 1
        member.say(f"applies round {round_} to {name!r}")
        return [jnp.asarray(value)], []

    def _round_vector(self, total: Any) -> tuple[Any]:
        vector = np.zeros(self._length, np.int32)
        vector[min(self._checks.rounds_in(total))] = 1
        return (vector,)
