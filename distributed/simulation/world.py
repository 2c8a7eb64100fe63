"""One schedule: the real coordinator and the real tasks, workers that follow a script, and what goes wrong.

What is simulated is below and above the code under test: the network with its faults, and what a worker's program
asks for. Between them run `Coordinator`, `TaskServer`, `Rendezvous`, `Execution` and `Exchange` as they are.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from dflow.distributed.coordinator import Coordinator
from dflow.distributed.coordinator_state import CoordinatorSettings
from dflow.distributed.coordinator_store import MemoryStore
from dflow.distributed.durable_records import Change
from dflow.distributed.messages import AnyMessage, AwaitBarrier, BarrierPassed, Claimed, ClaimSteps, Elected
from dflow.distributed.simulation.checks import Checks, Repeated, name_of
from dflow.distributed.simulation.events import EventQueue
from dflow.distributed.simulation.faults import COORDINATOR, Faults, check_hosts, drawn_faults
from dflow.distributed.simulation.network import Network, Process, SimulatedTransport
from dflow.distributed.simulation.script import Running
from dflow.distributed.simulation.tasks import AGAIN_S, Tasks
from dflow.distributed.simulation.worker import Worker

ADDRESS = f"{COORDINATOR}#listens"
SETTINGS = CoordinatorSettings()
TICK_S = 1.0
#: How often it is looked whether waits have ended.
LOOK_S = 0.5
#: How long a schedule may go on after its last fault: several times the longest wait of a step.
AFTER_FAULTS_S = 120.0
#: How long what is left over may take to end when the run is complete.
QUIET_S = 30.0


@dataclass(frozen=True)
class Schedule:
    """What is simulated; the same value gives the same events. `faults` None draws them from the seed."""

    seed: int
    workers: int = 3
    ps: int = 2
    steps: int = 9
    faults: Faults | None = None

    @property
    def hosts(self) -> tuple[str, ...]:
        """The coordinator, the ps tasks, the workers."""
        ps, workers = (f"ps:{index}" for index in range(self.ps)), (f"worker:{index}" for index in range(self.workers))
        return (COORDINATOR, *ps, *workers)

    @property
    def script(self) -> Faults:
        """What goes wrong."""
        return drawn_faults(self.seed, self.hosts) if self.faults is None else self.faults

    def command(self) -> str:
        """The command that runs it again with its log."""
        shape = f"--workers {self.workers} --ps {self.ps} --steps {self.steps}"
        return f"dflow simulate --seed {self.seed} {shape} --faults {shlex.quote(str(self.script))} --log"


@dataclass(frozen=True)
class Ended:
    """How a schedule ended. `broken` is the invariant that did not hold, empty when all did."""

    schedule: Schedule
    broken: str
    events: int
    ended_at_s: float
    repeated: tuple[Repeated, ...]

    def __str__(self) -> str:
        if self.broken:
            return f"at {self.ended_at_s:.3f} s: {self.broken}\n  to see it: {self.schedule.command()}"
        return (
            f"{self.schedule.steps} steps done at {self.ended_at_s:.1f} s in {self.events} events; "
            f"applied again after a failure: {len(self.repeated)}"
        )


def simulate(schedule: Schedule, log: Callable[[str], None] | None = None) -> Ended:
    """Run a schedule; `log` gets a line for whatever happens in it.

    raises  ValueError when a fault is of a host that there is not
    """
    check_hosts(schedule.script, schedule.hosts)
    world = _World(schedule, log)
    try:
        world.run()
    finally:
        world.close()
    return Ended(schedule, world.checks.broken, world.events.handled, world.events.now_s, world.checks.repeated())


class _World:
    def __init__(self, schedule: Schedule, log: Callable[[str], None] | None) -> None:
        self.events = EventQueue(schedule.seed)
        self._schedule = schedule
        self._log = log
        ps, workers = schedule.hosts[1 : 1 + schedule.ps], schedule.hosts[1 + schedule.ps :]
        self.checks = Checks(ps, schedule.steps)
        self._faults = schedule.script
        self._network = Network(self.events, schedule.seed, self._faults)
        self._tasks = Tasks(self.events, self._network, self.checks, self._say, ADDRESS)
        self._store = _Store()
        self._scripts: dict[str, Running] = {}
        self._workers: dict[Process, Worker] = {}
        self._steps_done = 0
        self._wants_more: dict[Process, bool] = {}
        self._look_at_s = 0.0
        self._coordinator = self._start_coordinator()
        self._network.on_said, self._network.on_raised = self._said, self._raised
        self._network.on_hearing, self._network.on_heard = self._hearing, self._heard
        for host in (*ps, *workers):
            self._start(host)
        self._plan_faults()

    def run(self) -> None:
        """Let everything happen, checking after each event, until all steps are done and nothing is left."""
        latest_s = self._faults.end_s + AFTER_FAULTS_S
        while not self._is_complete() and self.events.step(latest_s):
            self._check()
            if self.checks.broken:
                return
        done_s = max(self.events.now_s, self._faults.end_s)
        self._say("all", "the run is complete; what is left over ends" if self._is_complete() else "time is up")
        while self.events.step(done_s + QUIET_S) and not self.checks.broken:
            self._check()
        self.checks.end(self._tasks.statistics())

    def close(self) -> None:
        """End everything."""
        self._coordinator.close()
        self._tasks.close()

    def _is_complete(self) -> bool:
        return all(worker.is_complete for process, worker in self._workers.items() if process.is_alive)

    def _check(self) -> None:
        if self.events.now_s >= self._look_at_s:
            self._look_at_s = self.events.now_s + LOOK_S
            for host, script in self._scripts.items():
                if script.waits_until_s is not None:
                    self.checks.wait(host, script.waits_for, script.waits_until_s, self.events.now_s)
        if self._network.active == COORDINATOR:
            self.checks.log(len(self._coordinator.log()))
        else:
            self._tasks.check(self._network.active)

    def _say(self, who: str, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.events.now_s:9.4f}  {who:<12} {text}")

    def _said(self, process: Process, message: AnyMessage) -> None:
        """The coordinator says something to a task."""
        tasks = self._coordinator.status().tasks
        live = {info.task for info in tasks if info.left_at_s is None}
        self.checks.seen(tasks)
        match message:
            case Claimed(first, count) if count:
                self._say(COORDINATOR, f"gives steps {first} to {first + count - 1} to {process}")
                self.checks.claimed(name_of(str(process)), range(first, first + count), live)
            case Claimed() if self._wants_more.get(process):
                self.checks.told_complete(str(process), self._coordinator.status().steps_done)
            case BarrierPassed():
                self.checks.passed(name_of(str(process)), message)
            case Elected(True):
                self.checks.elected(name_of(str(process)))

    def _raised(self, process: Process, error: Exception) -> None:
        self.checks.require(False, "nothing raises", f"{process} stumbles over {type(error).__name__}: {error}")

    def _hearing(self, process: Process, message: AnyMessage) -> None:
        if isinstance(message, ClaimSteps):
            self.checks.claims(message.task)
            self._wants_more[process] = message.more
        elif isinstance(message, AwaitBarrier):
            self.checks.arrives(message.task)

    def _heard(self, process: Process, message: AnyMessage) -> None:
        """The coordinator has handled what a task said: by how many steps has the run gone on?"""
        if isinstance(message, ClaimSteps):
            before, self._steps_done = self._steps_done, self._coordinator.status().steps_done
            counted = self._steps_done - before
            text = f"{process} reports {message.done} steps and {counted} are counted"
            self.checks.require(counted in (0, message.done), "done once", text)
            worker = self._workers[process]
            self.checks.reported(worker.attempts[:counted])

    def _start_coordinator(self) -> Coordinator:
        process = self._network.start(COORDINATOR)
        self._say(str(process), "starts")
        coordinator = Coordinator(
            SimulatedTransport(self._network, process),
            ADDRESS,
            {"ps": self._schedule.ps, "worker": self._schedule.workers},
            store=self._store,
            settings=SETTINGS,
            tick_s=None,
            clock=lambda: self.events.now_s,
            wall_clock=lambda: self.events.now_s,
        )

        def tick() -> None:
            coordinator.tick()
            process.after(TICK_S, tick)

        process.after(TICK_S, tick)
        return coordinator

    def _start(self, host: str) -> None:
        if host == COORDINATOR:
            self._coordinator = self._start_coordinator()
            return
        process = self._network.start(host)
        self._say(str(process), "starts")
        member = self._tasks.start(process, partial(self._end, process, True, AGAIN_S, "ends, since it was given up"))
        if host.startswith("ps:"):
            self._scripts[host] = Running(self.events, process, member.join())
        else:
            ps = self._schedule.hosts[1 : 1 + self._schedule.ps]
            worker = self._workers[process] = Worker(member, self._tasks, self.checks, self._schedule.steps, ps)
            self._scripts[host] = Running(self.events, process, worker.script())

    def _plan_faults(self) -> None:
        for is_told, stops in ((True, self._faults.kill), (False, self._faults.power)):
            for stop in stops:
                self.events.at(stop.at_s, partial(self._stop, stop.host, is_told, stop.back_after_s))
        for hang in self._faults.hang:
            self.events.at(hang.at_s, partial(self._hang, hang.host, hang.at_s + hang.for_s))
        for cut in self._faults.cut:
            between = f"{cut.one} and {cut.other}"
            self.events.at(cut.at_s, partial(self._say, "network", f"{between} are cut off from each other"))
            self.events.at(cut.at_s + cut.for_s, partial(self._say, "network", f"{between} reach each other again"))

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
        self.events.after(back_after_s, partial(self._start, process.host))


class _Store(MemoryStore):
    """Outlives the coordinator, which may end as soon as something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.at_next_write: Callable[[], None] | None = None

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes."""
        super().write(changes)
        end, self.at_next_write = self.at_next_write, None
        if end is not None:
            end()
