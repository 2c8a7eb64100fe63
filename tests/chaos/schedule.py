"""The faults of a round as a value, which its seed determines.

A fault begins when a given part of the training is done, and after a further delay. So a schedule is the same on each
machine, while its times, and what the processes do at these times, differ from run to run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

COORDINATOR = "coordinator"
#: The moments that the processes of each program reach.
MOMENTS = ("creation", "first call", "registration", "capture", "write", "commit", "restore")
#: Kinds of faults by role. `kill`, `terminate` and `pause` are signals; `cut` and `hold` are of the connection to the
#: coordinator, of all connections for the coordinator itself; `break` breaks all connections again and again, those
#: between tasks too; `full` refuses each write to a file.
KINDS: Mapping[str, tuple[str, ...]] = {
    "worker": ("kill", "kill", "terminate", "pause", "cut", "hold", "break"),
    "ps": ("kill", "kill", "terminate", "pause", "cut", "hold", "break", "full"),
    COORDINATOR: ("kill", "kill", "terminate", "pause", "cut", "full"),
}
#: The same with workers that compute together: JAX itself aborts a process whose connection to its service breaks, and
#: parameter tasks write parts of the program's checkpoints, which fail on a full disk.
GROUP_KINDS: Mapping[str, tuple[str, ...]] = {
    **KINDS,
    "worker": tuple(kind for kind in KINDS["worker"] if kind != "break"),
    "ps": tuple(kind for kind in KINDS["ps"] if kind != "full"),
}
#: Faults after which a process is started again. The launcher's pauses double with each, so a task has few of them.
ENDS = ("kill", "terminate")
MOST_ENDS = 3
#: Part of the steps after which no fault begins: a parameter task that dies when all steps are done undoes steps that
#: no worker repeats.
LAST = 0.75


@dataclass(frozen=True)
class Fault:
    """A fault of `task` that lasts `for_s`; it begins `after_s` after the part `at` of all steps is done.

    With `at` below 0 the steps need not have begun, nor the first snapshot be complete. With `moment`, the name of a
    moment of `dflow.tracing.moments`, the task is killed when any process reaches that for the `count`th time.
    """

    kind: str
    task: str
    at: float
    after_s: float = 0.0
    for_s: float = 0.0
    moment: str = ""
    count: int = 1

    def __str__(self) -> str:
        if self.moment:
            return f"{self.kind} {self.task} at {self.moment!r} number {self.count}"
        when = "at the start" if self.at < 0 else f"at {self.at:.0%} of the steps"
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.kind} {self.task}{lasting} {when} + {self.after_s:g} s"


@dataclass(frozen=True)
class Hazards:
    """The faults that may be drawn for a program.

    kinds    by role, for the roles that it has
    moments  least and most number of moments at which faults come
    at_once  number of tasks with a fault at such a moment, one of these
    named    the named moments at which a process may be killed
    """

    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: KINDS)
    moments: tuple[int, int] = (3, 5)
    at_once: tuple[int, ...] = (1, 1, 2, 3)
    named: tuple[str, ...] = MOMENTS


@dataclass(frozen=True)
class Schedule:
    """The program of a round, its number of workers, and the faults."""

    program: str
    workers: int
    faults: tuple[Fault, ...]


def drawn_schedule(seed: int, programs: Mapping[str, Hazards]) -> Schedule:
    """Draw a schedule for one of the programs, the same for the same seed."""
    draw = random.Random(f"chaos {seed}")
    program, workers = draw.choice(list(programs)), draw.choice((2, 3))
    hazards, of_workers = programs[program], [f"worker:{index}" for index in range(workers)]
    tasks = [*(["ps:0", "ps:1"] if "ps" in hazards.kinds else []), *of_workers, COORDINATOR]
    ended: Counter[str] = Counter()

    def fault(task: str, at: float) -> Fault:
        kind = draw.choice(hazards.kinds[task.partition(":")[0]])
        if kind in ENDS and ended[task] == MOST_ENDS:
            kind = "pause"
        ended[task] += kind in ENDS
        for_s = 0.0 if kind in ENDS else draw.choice((0.2, 1.0, 3.0, 12.0))
        return Fault(kind, task, at, draw.choice((0.0, 0.0, 0.3, 1.5, 4.0)), for_s)

    faults = []
    if draw.random() < 0.3:
        faults.append(fault(draw.choice([*of_workers, COORDINATOR]), -1.0))
    for _ in range(draw.randint(*hazards.moments)):
        at = round(draw.random() * LAST, 2)
        faults += [fault(task, at) for task in draw.sample(tasks, draw.choice(hazards.at_once))]
    if "ps" in hazards.kinds and "break" in hazards.kinds["worker"] and draw.random() < 0.5:
        faults.append(
            Fault("kill", draw.choice(tasks), 0.0, moment=draw.choice(hazards.named), count=draw.choice((1, 1, 2, 5)))
        )
    return Schedule(program, workers, tuple(sorted(faults, key=lambda one: one.at)))
