"""A simulated cluster with a program and faults, and its run.

Simulated are the layers below and above the code under test: the network with its faults and the clock, and what the
program of a worker computes. Between them run the real `Coordinator`, `SessionDriver`, `TaskServer`, `Peer`,
`Session`, `Async`, `Sync` and `TaskSnapshots`.
"""

from __future__ import annotations

import logging
import random
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest

from dflow.distributed.asynchronous import async_
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.coordinator_store import MemoryStore
from dflow.distributed.coordinator.durable_records import Change
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.steps import retries
from dflow.distributed.synchronous import sync
from dflow.distributed.training import long_wait, step_report
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.wire.messages.coordination import AwaitBarrier, BarrierPassed, Elected
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.placement import Placed
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Roster
from dflow.lowering.queues.timers import timers_started_by
from dflow.tracing import moments
from tests.simulation.checks import HOLDER_S, Checks, Repeated, name_of
from tests.simulation.events import EventQueue, PendingEvent
from tests.simulation.faults import COORDINATOR, Faults, check_hosts, drawn_faults, with_drawn_losses
from tests.simulation.link import Connections, SimulatedTransport
from tests.simulation.network import Network, Process
from tests.simulation.programs import PROGRAMS, SNAPSHOTS, STEPS, WITH_SNAPSHOTS, WorkerProgram
from tests.simulation.round_checks import RoundChecks
from tests.simulation.round_snapshot_checks import RoundSnapshotChecks
from tests.simulation.round_snapshots_program import RoundSnapshotsWorker
from tests.simulation.rounds_program import RoundsWorker
from tests.simulation.simulated_disks import SimulatedDisks
from tests.simulation.simulated_threads import SimulatedTime
from tests.simulation.snapshot_checks import SnapshotChecks, StepSnapshotChecks
from tests.simulation.snapshots_program import SnapshotsWorker
from tests.simulation.steps_program import StepsWorker
from tests.simulation.tasks import AGAIN_S, Member, SimulatedTasks
from tests.simulation.variables_program import VariableChecks, VariablesWorker

LOGGER = logging.getLogger("dflow")
ADDRESS = f"{COORDINATOR}#listens"
TICK_S = 1.0
#: Interval between the checks of waits, memory and completion.
LOOK_S = 1.0
#: Time between two snapshots, and the number of steps in the program with snapshots for each of the schedule's.
SNAPSHOT_EVERY_S = 2.0
LONGER = 4
#: Longest run of a schedule after its last fault: several times the longest wait of a step; longer for more steps.
AFTER_FAULTS_S = 120.0
#: Longest time until all waits and steps have ended, once the run is complete.
QUIET_S = 30.0


@dataclass(frozen=True)
class FaultSchedule:
    """The parameters of a simulation; equal values give equal events. With `faults` None, they are drawn from the seed.

    `program`  what the workers do, one of `PROGRAMS`
    `steps`    number of steps or rounds of the run; each worker does 3 ops per step on variables.
               In the programs with snapshots, a run has 4 times as many steps
    """

    seed: int
    workers: int = 3
    ps: int = 2
    steps: int = 9
    faults: Faults | None = None
    program: str = STEPS

    @property
    def hosts(self) -> tuple[str, ...]:
        """The coordinator, the ps tasks and the workers, in this order."""
        ps, workers = (f"ps:{index}" for index in range(self.ps)), (f"worker:{index}" for index in range(self.workers))
        return (COORDINATOR, *ps, *workers)

    @property
    def actual_faults(self) -> Faults:
        """The faults, given or drawn."""
        if self.faults is not None:
            return self.faults
        drawn = drawn_faults(self.seed, self.hosts)
        if self.program not in WITH_SNAPSHOTS:
            return drawn
        return with_drawn_losses(drawn, self.seed, self.hosts[1 : 1 + self.ps])

    def command(self) -> str:
        """Return the command that runs this schedule again, with its log."""
        shape = f"--workers {self.workers} --ps {self.ps} --steps {self.steps}"
        shape += f" --program {self.program}" if self.program != STEPS else ""
        faults = shlex.quote(str(self.actual_faults))
        return f"python -m tests.simulation --seed {self.seed} {shape} --faults {faults} --log"


@dataclass(frozen=True)
class ScheduleResult:
    """The result of a schedule. `broken` describes the violated invariant; empty if all held.

    at_moments  the faults at moments that were reached
    """

    schedule: FaultSchedule
    broken: str
    events: int
    ended_at_s: float
    repeated: tuple[Repeated, ...]
    at_moments: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.broken:
            return f"at {self.ended_at_s:.3f} s: {self.broken}\n  to see it: {self.schedule.command()}"
        return (
            f"{self.schedule.steps} steps done at {self.ended_at_s:.1f} s in {self.events} events; "
            f"tried again after they had been applied: {len(self.repeated)}"
        )


def simulate(schedule: FaultSchedule, log: Callable[[str], None] | None = None) -> ScheduleResult:
    """Run a schedule; `log` is called with a line for each notable event.

    raises  ValueError when a fault names an unknown host, or the program is unknown
    """
    check_hosts(schedule.actual_faults, schedule.hosts)
    if schedule.program not in PROGRAMS:
        raise ValueError(f"there is no program {schedule.program!r}; there are {', '.join(PROGRAMS)}")
    run = _ScheduleRun(schedule, log)
    LOGGER.addFilter(run.keep_record)
    try:
        with timers_started_by(run.start_timer), run.patched():
            run.run()
    finally:
        run.close()
        LOGGER.removeFilter(run.keep_record)
    ended = run.checks.broken, run.events.handled, run.events.now_s, run.checks.repeated()
    return ScheduleResult(schedule, *ended, tuple(run.at_moments))


class _ScheduleRun:
    def __init__(self, schedule: FaultSchedule, log: Callable[[str], None] | None) -> None:
        self.events = EventQueue(schedule.seed)
        self._schedule = schedule
        self._log = log
        ps = schedule.hosts[1 : 1 + schedule.ps]
        self._steps = LONGER * schedule.steps if schedule.program in WITH_SNAPSHOTS else schedule.steps
        self._snapshot_checks: SnapshotChecks | None = None
        if schedule.program in WITH_SNAPSHOTS:
            kind = StepSnapshotChecks if schedule.program == SNAPSHOTS else RoundSnapshotChecks
            self._snapshot_checks = kind(ps, self._steps)
        self.checks = self._snapshot_checks or Checks(ps, self._steps if schedule.program == STEPS else 0)
        self._round_checks = RoundChecks(self.checks.require, ps)
        self._variable_checks = VariableChecks(self.checks.require)
        self._first_ps = ps[0]
        self._faults = schedule.actual_faults
        self._network = Network(self.events, schedule.seed, self._faults)
        self._connections = Connections()
        self._disks = SimulatedDisks(self.events, self._network, self._faults, schedule.seed)
        folder, connections = self._disks.folder, self._connections
        self._tasks = SimulatedTasks(self.events, self._network, self.checks, self._say, ADDRESS, connections, folder)
        if self._snapshot_checks is not None:
            self._snapshot_checks.tasks, self._snapshot_checks.disks = self._tasks, self._disks
        self._store = _Store()
        full = [outage for outage in self._faults.full if outage.hosts == (COORDINATOR,)]
        self._store.is_full = lambda: any(one.at_s <= self.events.now_s < one.end_s for one in full)
        #: Number of times that each moment was reached, and the faults that came at one.
        self._moments: Counter[str] = Counter()
        self.at_moments: list[str] = []
        self._workers: dict[Process, WorkerProgram] = {}
        self._steps_done = 0
        self._wants_more: dict[Process, bool] = {}
        self._look_at_s = 0.0
        self._was_complete = False
        self._network.on_said, self._network.on_raised = self._said, self._raised
        self._network.on_misheard = self._misheard
        self._network.on_hearing, self._network.on_heard = self._hearing, self._heard
        self._tasks.on_roster = self._roster
        if isinstance(self.checks, RoundSnapshotChecks):
            self._tasks.on_notice = self.checks.notified

    def run(self) -> None:
        """Run the events, with checks in between, until the run is complete and nothing is left, or time is up."""
        for host in self._schedule.hosts:
            self._start(host)
        self._plan_faults()
        longer = LONGER if self._snapshot_checks is not None else 1
        latest_s = self._faults.end_s + longer * AFTER_FAULTS_S
        step, checks = self.events.step, self.checks
        while not self._was_complete and step(latest_s):
            self._check()
            if checks.broken:
                return
        if not self._is_complete():
            waiting = sorted(str(process) for process, one in self._workers.items() if not one.is_complete)
            self.checks.require(self._schedule.program == STEPS, "none lost", f"{waiting} are not done at the end")
        done_s = max(self.events.now_s, self._faults.end_s)
        self._say("all", "the run is complete; what is left over ends" if self._is_complete() else "time is up")
        while not self._is_at_rest() and self.events.step(done_s + QUIET_S) and not self.checks.broken:
            self._check()
        if self.events.awaited == 0:
            self.checks.require(not (text := self._connections.unheard()), "heard once", text)
            self.checks.require(not (text := self._connections.overfull()), "bounded", text)
        self.checks.end(self._tasks.statistics())
        self._round_checks.end()

    def keep_record(self, record: logging.LogRecord) -> bool:
        """Put a record of the runtime's log into the schedule's, and nowhere else; errors violate an invariant."""
        text = record.getMessage()
        self._say(self._network.active, text)
        self.checks.require(record.levelno < logging.ERROR, "nothing raises", f"{self._network.active} logs: {text}")
        return False

    def start_timer(self, delay_s: float, call: Callable[[], None]) -> PendingEvent:
        """Run `call` after `delay_s` in the process that is active now."""
        return self.events.after(delay_s, partial(self._network.process(self._network.active).post, call))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Have strategies and snapshots use the simulated time and disks."""
        with self._disks.used(), pytest.MonkeyPatch.context() as patch:
            for module in (async_, long_wait, step_report, sync, retries):
                patch.setattr(module, "time", SimulatedTime(self.events))
            patch.setattr(moments, "hook", self._reached)
            yield

    def _reached(self, moment: str, task: str) -> None:
        self._moments[moment] += 1
        for fault in self._faults.at:
            if (fault.name, fault.count) == (moment, self._moments[moment]):
                self.at_moments.append(str(fault))
                self._end(self._network.process(fault.host), True, fault.for_s, f"is killed as {task} is at {moment!r}")

    def close(self) -> None:
        """End everything."""
        self._coordinator.close()
        self._tasks.close()
        self._disks.close()

    def _is_complete(self) -> bool:
        live = [worker.is_complete for process, worker in self._workers.items() if process.is_alive]
        if self._snapshot_checks is not None:
            # A task that dies after the run takes steps back, so all faults have to be over.
            is_over = self.events.now_s >= self._faults.end_s and len(live) == self._schedule.workers
            if not is_over or not self._snapshot_checks.is_settled():
                return False
        return any(live) and all(live)

    def _is_at_rest(self) -> bool:
        """Whether the run is complete, no event is pending, and no task holds anything of a step."""
        return (
            self.events.awaited == 0 and self._is_complete() and self.checks.is_nothing_left(self._tasks.statistics())
        )

    def _check(self) -> None:
        if self.events.now_s >= self._look_at_s:
            self._look()

    def _look(self) -> None:
        """Check the conditions that last; once in `LOOK_S` is enough for them."""
        self._look_at_s = self.events.now_s + LOOK_S
        self._was_complete = self._is_complete()
        self._tasks.check()

    def _say(self, who: str, text: str) -> None:
        if self._log is not None:
            # The folder has another name in each run.
            self._log(f"{self.events.now_s:9.4f}  {who:<12} {text}".replace(str(self._disks.folder), "DISKS"))

    def _said(self, process: Process, message: Message) -> None:
        """Check a message that the coordinator sends to a task."""
        if self._snapshot_checks is not None:
            self._snapshot_checks.tells(message)
        live: set[str] = set()
        if isinstance(message, Claimed | Elected | Roster):
            tasks = self._coordinator.status().tasks
            live = {info.task for info in tasks if info.left_at_s is None}
            self.checks.seen(tasks)
        match message:
            case Claimed(first, count) if count:
                self._say(COORDINATOR, f"gives steps {first} to {first + count - 1} to {process}")
                self.checks.claimed(name_of(str(process)), range(first, first + count), live)
            case Claimed() if self._wants_more.get(process):
                self.checks.told_complete(str(process), self._coordinator.status().steps_done)
            case Placed():
                self.checks.holds(message.process, self._coordinator.status().now_s)
            case BarrierPassed():
                self.checks.passed(name_of(str(process)), message)
            case Elected(True):
                self.checks.elected(name_of(str(process)))

    def _raised(self, process: Process, error: Exception) -> None:
        self.checks.require(False, "nothing raises", f"{process} stumbles over {type(error).__name__}: {error}")

    def _misheard(self, process: Process, text: str) -> None:
        self.checks.require(False, "heard once", f"{process} {text}")

    def _hearing(self, process: Process, message: Message) -> None:
        if isinstance(message, ClaimSteps):
            self.checks.claims(message.task)
            self._wants_more[process] = message.more
        elif isinstance(message, AwaitBarrier):
            self.checks.arrives(message.task)
        elif isinstance(message, Heartbeat | Join):
            self.checks.lives(str(process), self._coordinator.status().now_s)
        if self._snapshot_checks is not None:
            self._snapshot_checks.hears(message)

    def _heard(self, process: Process, message: Message) -> None:
        """After the coordinator has handled a claim, check by how many steps the run has progressed."""
        if self._snapshot_checks is not None:
            self._snapshot_checks.has_heard(message)
        elif isinstance(message, ClaimSteps):
            before, self._steps_done = self._steps_done, self._coordinator.status().steps_done
            counted = self._steps_done - before
            text = f"{process} reports {message.done} steps and {counted} are counted"
            self.checks.require(counted in (0, message.done), "done once", text)
            worker = self._workers[process]
            if isinstance(worker, StepsWorker):
                self.checks.reported(worker.attempts[:counted])

    def _start_coordinator(self) -> Coordinator:
        process = self._store.process = self._network.start(COORDINATOR)
        self._say(str(process), "starts")
        every_s = 0.0 if self._snapshot_checks is None else SNAPSHOT_EVERY_S
        coordinator = make_coordinator(
            SimulatedTransport(self._network, process, self._connections),
            ADDRESS,
            {"ps": self._schedule.ps, "worker": self._schedule.workers},
            store=self._store,
            settings=CoordinatorSettings(holder_timeout_s=HOLDER_S, snapshot_every_s=every_s),
            tick_s=None,
            clock=lambda: self.events.now_s,
        )

        self.checks.coordinator_started(coordinator.status().now_s)
        if self._snapshot_checks is not None:
            self._snapshot_checks.state = coordinator._state

        def tick() -> None:
            coordinator.tick()
            process.after(TICK_S, tick, is_routine=True)

        process.after(TICK_S, tick, is_routine=True)
        return coordinator

    def _start(self, host: str) -> None:
        if host == COORDINATOR:
            self._coordinator = self._start_coordinator()
            return
        process = self._network.start(host)
        self._say(str(process), "starts")
        member = self._tasks.start(process, partial(self._end, process, True, AGAIN_S, "ends, since it was given up"))
        if host.startswith("ps:"):
            member.start()
        else:
            worker = self._workers[process] = self._program(member)
            member.start(worker.run)

    def _program(self, member: Member) -> WorkerProgram:
        schedule, host = self._schedule, member.process.host
        ps = schedule.hosts[1 : 1 + schedule.ps]
        limit = random.Random(f"staleness {schedule.seed}").choice((None, 0, 1, 2, 4, 8, 12))
        match schedule.program:
            case "rounds" | "round-snapshots":
                draw = random.Random(f"rounds {schedule.seed}")
                workers, checks = schedule.workers, self._snapshot_checks
                backups, ends = draw.randrange(workers), draw.random() < 0.4
                data = draw.randint(1, self._steps) if ends and host != "worker:0" else 1 << 30
                shape = ps, self._steps, workers, backups, data
                if isinstance(checks, RoundSnapshotChecks):
                    return RoundSnapshotsWorker(member, self._tasks, self._round_checks, checks, *shape, schedule.seed)
                return RoundsWorker(member, self._tasks, self._round_checks, *shape)
            case "variables":
                ops = 3 * schedule.steps
                return VariablesWorker(member, self._tasks, self._variable_checks, ops, str(schedule.seed))
            case "snapshots":
                assert isinstance(self._snapshot_checks, StepSnapshotChecks)
                return SnapshotsWorker(member, self._tasks, self._snapshot_checks, self._steps, ps, limit)
            case _:
                return StepsWorker(member, self._tasks, self.checks, schedule.steps, ps, limit)

    def _roster(self, member: Member, roster: Roster) -> None:
        if member.process.host == self._first_ps:
            self._round_checks.sees(roster, self.events.now_s)

    def _plan_faults(self) -> None:
        # Faults are routine events: the simulation need not wait for those after the end of the run.
        plan = partial(self.events.at, is_routine=True)
        for is_told, stops in ((True, self._faults.kill), (False, self._faults.power)):
            for stop in stops:
                plan(stop.at_s, partial(self._stop, stop.hosts[0], is_told, stop.for_s))
        for hang in self._faults.hang:
            plan(hang.at_s, partial(self._hang, hang.hosts[0], hang.end_s))
        for cut in self._faults.cut:
            between = " and ".join(cut.hosts)
            plan(cut.at_s, partial(self._say, "network", f"{between} are cut off from each other"))
            plan(cut.end_s, partial(self._say, "network", f"{between} reach each other again"))

    def _hang(self, host: str, until_s: float) -> None:
        self._say(host, f"hangs until {until_s:.2f} s")
        self._network.process(host).hang(until_s)

    def _stop(self, host: str, is_told: bool, back_after_s: float) -> None:
        process = self._network.process(host)
        end = partial(self._end, process, is_told, back_after_s, "is killed" if is_told else "loses power")
        if host == COORDINATOR and not is_told:
            self._store.at_next_write = end
        else:
            end()

    def _end(self, process: Process, is_told: bool, back_after_s: float, why: str) -> None:
        if not process.is_alive:
            return
        self._say(str(process), why)
        self._network.end(process, is_told=is_told)
        if process.host != COORDINATOR:
            self._tasks.end(process)
            self.checks.died(str(process), why)
        elif not self._coordinator._state.core.is_durable:
            self.checks.forgets_claims()
        self.events.after(back_after_s, partial(self._start, process.host), is_routine=True)


class _Store(MemoryStore):
    """The coordinator's store, which outlives it; `at_next_write` is called after the next write, to end it there."""

    def __init__(self) -> None:
        super().__init__()
        self.at_next_write: Callable[[], None] | None = None
        self.process: Process
        self.is_full: Callable[[], bool] = bool

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes, unless the process has just ended."""
        if not self.process.is_alive or self.is_full():
            raise OSError("its process has ended, or its disk is full")
        super().write(changes)
        end, self.at_next_write = self.at_next_write, None
        if end is not None:
            end()
