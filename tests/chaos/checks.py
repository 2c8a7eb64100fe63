"""The invariants of a round; each check returns the violations that it finds, as text.

- Each committed snapshot is the state after a number of whole steps of the program's only run: each task has recorded
  the same steps, each counter has their number, and the coordinator's ledger has no other steps as done.
- No process ends but by its faults, when it has finished, or when the launcher ends it.
- No process prints a traceback, but a worker that was silent for so long that its steps have gone to others, and a
  coordinator whose state cannot be written.
- Of workers that compute together, all end when one of them does, or the coordinator, or a parameter task: by an error
  that names the loss, or after a checkpoint when one is terminated, and not more often than there are faults.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dflow.distributed.asynchronous.step_claims import StepClaims
from dflow.distributed.collectives.process_group import STATUS as GROUP_LOST
from dflow.distributed.coordinator.coordinator_part import copies_of
from dflow.distributed.coordinator.coordinator_store import SqliteStore
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.process.child_process import describe_end
from dflow.distributed.process.termination import STATUS as TERMINATED
from dflow.distributed.snapshots.resumption import Snapshot
from dflow.distributed.training.run_progress import RunProgress
from dflow.lowering.files.array_files import read_arrays
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import CheckpointError, TaskLost
from tests.chaos.faulty_place import Life
from tests.chaos.schedule import COORDINATOR

#: Variables that each step increments.
_COUNTER = re.compile(r"(count|total) \d|adam/\d/count")
#: The line after a traceback; lines of other threads may come before it.
_ERROR = re.compile(r"[A-Za-z_][\w.]*(: |$)")
#: The errors of a worker whose group is over.
_LOSSES = f"{TaskLost.__module__}.{TaskLost.__name__}: "
#: Exit statuses that a fault explains, beside 0.
_STATUSES = {
    "kill": (-signal.SIGKILL,),
    "terminate": (-signal.SIGTERM, TERMINATED),
    # The coordinator ends when its state cannot be written.
    "full": (1,),
}


def check_committed(snapshots: Path, state: Path) -> Iterator[str]:
    """Yield the violations of the committed snapshot; `state` is the coordinator's file, which no process uses."""
    store = SqliteStore(state)
    try:
        found = [one for _, one in DurableRecords(store.load()).load("snapshot/committed", Snapshot)]
    finally:
        store.close()
    for snapshot in found:
        try:
            yield from (f"snapshot {snapshot.number}: {text}" for text in _check_parts(snapshots, snapshot))
        except CheckpointError as error:
            yield f"snapshot {snapshot.number} is committed, and cannot be read: {error}"


def _check_parts(snapshots: Path, snapshot: Snapshot) -> Iterator[str]:
    applied: dict[str, list[int]] = {}
    counters: dict[str, np.ndarray] = {}
    for task in map(short_task_name, snapshot.tasks):
        files = read_arrays(snapshots / task.replace(":", "-") / str(snapshot.number))
        counters |= files.read({name: None for name in files.types if _COUNTER.fullmatch(name)})
        # A round is an update of all tasks; each worker's step in it is recorded beside it.
        calls = [call for call in files.metadata["applied"] if "\nsteps of " not in call["run"]]
        applied[task] = sorted(step for call in calls for first, end in call["whole"] for step in range(first, end))
        if begun := {step: counts for call in calls for step, counts in call["begun"].items() if any(counts.values())}:
            yield f"{task} has applied parts of steps: {begun}"
    first = next(iter(applied.values()), [])
    for task, steps in applied.items():
        if len({*steps}) < len(steps):
            yield f"{task} has applied {len(steps) - len({*steps})} steps twice"
        if steps != first:
            more, fewer = {*steps} - {*first}, {*first} - {*steps}
            yield f"{task} has {_some(more)} that others have not, and lacks {_some(fewer)}"
    for name, value in counters.items():
        if not np.all(value == len(first)):
            yield f"{name!r} is {np.unique(value)} after {len(first)} steps"
    for run in next(copies_of(StepClaims, snapshot.copies)).runs.values():
        open_steps = {step for pair in (*run.pool, *run.left_over) for step in range(*pair)}
        if lost := {*range(run.total_steps)} - open_steps - {*first}:
            yield f"the ledger has {_some(lost)} as done, which no task has applied"
    for rounds, _ in next(copies_of(RunProgress, snapshot.copies)).rounds.values():
        if rounds > len(first):
            yield f"the ledger has {rounds} rounds as done, and the tasks have applied {len(first)}"


def _some(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"{len(known)} steps {known[:5]}"


def silent_workers(lives: Sequence[Life], lines: Iterable[tuple[str, str]]) -> set[str]:
    """Return the workers that were silent by a fault for so long that the coordinator did not take them back.

    Such a worker ends with an error, since its steps have gone to others, and is started again.
    """
    refused = {task for task, text in lines if "did not take this task back" in text}
    faulty = {life.task for life in lives if {*life.faults} & {"pause", "cut", "hold"}}
    is_cut_from_all = any(life.task == COORDINATOR and "cut" in life.faults for life in lives)
    return {task for task in refused if task.startswith("worker") and (task in faulty or is_cut_from_all)}


def check_ends(lives: Sequence[Life], silent: Container[str], is_group: bool) -> Iterator[str]:
    """Yield the processes that still run, or ended with a status that their faults do not explain.

    silent    workers that may have ended with an error
    is_group  whether the workers compute together
    """
    last = {life.task: life for life in lives}
    is_terminated = any("terminate" in life.faults for life in lives)
    for life in lives:
        status = life.child.poll()
        expected = {0, *(status for kind in life.faults for status in _STATUSES.get(kind, ()))}
        if last[life.task] is life and not life.task.startswith("worker"):
            # The launcher interrupts it at the end, and kills a process that does not end in time.
            expected |= {128 + signal.SIGINT, -signal.SIGKILL}
        if life.task in silent:
            expected.add(1)
        if is_group and life.task.startswith("worker"):
            expected |= {1, GROUP_LOST, *([TERMINATED] if is_terminated else [])}
        if status is None:
            yield f"{life.task}, process {life.child.pid}, still runs"
        elif status not in expected:
            yield f"{life.task}, process {life.child.pid}, ended: {describe_end(status)}; its faults: {life.faults}"


def check_lines(lines: Iterable[tuple[str, str]], expected: Container[str]) -> Iterator[str]:
    """Yield the tracebacks in the lines, which are pairs of a task and its text, but those of the `expected` tasks."""
    for task, text in lines:
        if text.startswith("Traceback (most recent call last)") and task not in expected:
            yield f"{task} printed a traceback"


def check_group(lives: Sequence[Life], lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the errors of workers that compute together which are not the loss of a task, and ends without a fault."""
    faults = sum(len(life.faults) for life in lives)
    for task, count in Counter(life.task for life in lives).items():
        if count > 1 + faults:
            yield f"{task} was started {count} times for {faults} faults"
    in_traceback: set[str] = set()
    errors: defaultdict[str, list[str]] = defaultdict(list)
    for task, text in lines:
        if text.startswith("Traceback (most recent call last)"):
            in_traceback.add(task)
        elif task in in_traceback and _ERROR.match(text):
            in_traceback.discard(task)
            errors[task].append(text)
        elif text.startswith("The above exception was the direct cause"):
            del errors[task][-1:]
    for task, texts in errors.items():
        yield from (f"{task} ended by {text}" for text in texts if not text.startswith(_LOSSES))
