"""The task that holds each variable, queue or accumulator, and the task's process, decided once per name.

Invariants:
- a name is placed once; every later request with the same dtype and shape gets the same task;
- a variable goes to the task with the fewest bytes placed, and to the lowest index among equals, so the same
  requests in the same order give the same placement;
- `near` overrides this: the variable shares the task of the one named, and its bytes count there; so does an explicit
  task; and a run has the host of the newest run of its kind, unless that has lost something;
- an abandoned name is free;
- the state of a process is lost when another process joins under its task's name: each later request for it is refused
  until the name is abandoned, since the new process would create it from its initial value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

import msgspec

from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import Membership
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable
from dflow.distributed.wire.messages.status import VariableInfo
from dflow.tracing.devices.task_name import short_task_name


class _Placement(msgspec.Struct, frozen=True):
    """The `number`-th placement."""

    number: int
    info: VariableInfo


def placed_again(infos: Iterable[VariableInfo]) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield the directory's records, with their keys, for a new cluster that resumes a snapshot with these placements.

    Each name stays on its task, but with an ended process. So it is lost once the task joins, and is loaded again.
    """
    for number, info in enumerate(infos):
        yield _PLACED + info.name, _Placement(number, msgspec.structs.replace(info, process=info.process or _ENDED))


class VariableDirectory:
    """The placed variables, queues and accumulators of one cluster, kept in `records`.

    `has_snapshots`  whether snapshots of the state are made
    """

    def __init__(self, members: Membership, records: DurableRecords, *, has_snapshots: bool = False) -> None:
        self._members = members
        self._records = records
        self._has_snapshots = has_snapshots
        #: Number of the snapshot of an earlier cluster that this one goes on from; 0 for none.
        self.resumed = 0
        self._placements: dict[str, _Placement] = {}
        self._load_bytes: Counter[str] = Counter()
        #: The answer of `lost`, until a placement or a process changes.
        self._lost: tuple[str, ...] | None = None
        #: Names placed on a task that has not joined yet, by task.
        self._before_joining: defaultdict[str, list[str]] = defaultdict(list)
        known = [placement for _, placement in records.load(_PLACED, _Placement)]
        for placement in sorted(known, key=lambda placement: placement.number):
            self._add(placement)
        self._next_number = 1 + max((placement.number for placement in known), default=-1)

    def place(self, request: PlaceVariable) -> Placed | Failure:
        """Return the task that holds the variable; choose it at the first request.

        Returns a Failure of kind VariableError when the name has another type or `near` is unknown, of kind
        DeviceError when there is no task to place it on, or it is on another task than `request.on`, and of kind
        TaskLost when the process that held it, or the variable `near`, has left.
        """
        answer = self._placed(request)
        if isinstance(answer, Failure) and answer.kind == "VariableError" and self.resumed:
            remedy = "which has the first: give the program of that snapshot, or another folder for --snapshots"
            return Failure(answer.kind, f"{answer.text}\n  the job goes on from snapshot {self.resumed}, {remedy}")
        if isinstance(answer, Placed) and request.is_saved and self._has_snapshots:
            return msgspec.structs.replace(answer, is_saved=True)
        return answer

    def _placed(self, request: PlaceVariable) -> Placed | Failure:
        known = self._placements.get(request.name)
        if known is not None:
            return self._found(known.info, request)
        what, near = _what(request), self._placements.get(request.near)
        if request.near and near is None:
            text = f"{what} was to share the task of {request.near!r}, which is not placed"
            return Failure("VariableError", f"{text}; place {request.near!r} first")
        if near is not None and (lost := self._loss(near.info)):
            return Failure("TaskLost", lost)
        jobs = self._members.by_job()
        tasks = jobs.get(request.job, ())
        if not request.near and not tasks:
            text = f"{what} was to be placed on job {request.job!r}, which has no task that is live or expected"
            return Failure("DeviceError", f"{text}; the jobs there are: {', '.join(jobs) or 'none'}")
        if request.on and request.on not in tasks:
            text = f"{what} was to be placed on {request.on}, which is none of the tasks there: {', '.join(tasks)}"
            return Failure("DeviceError", text)
        task = request.on or (near.info.task if near else "") or self._least_loaded(request, tasks)
        process = self._members.process(task)
        info = VariableInfo(
            request.name,
            request.dtype,
            request.shape,
            request.size_bytes,
            task,
            request.kind,
            process,
            request.is_saved,
        )
        placement = _Placement(self._next_number, info)
        self._records.put(_PLACED + info.name, placement)
        self._next_number += 1
        self._add(placement)
        return Placed(task, process)

    def _least_loaded(self, request: PlaceVariable, tasks: Sequence[str]) -> str:
        """Return the one of `tasks` with the fewest bytes; for a run the host of the newest one like it, if any.

        A step is traced for its run's host, and would be traced again for another. A task that has lost something is no
        host, since programs of the steps, and accumulators, are lost with its process.
        """
        if request.kind == "run":
            infos = [placement.info for placement in self._placements.values()]
            lost = {info.task for info in infos if self._loss(info)}
            tasks = [task for task in tasks if task not in lost] or tasks
            hosts = [info.task for info in infos if (info.kind, info.dtype) == (request.kind, request.dtype)]
            tasks = [task for task in hosts if task in tasks][-1:] or tasks
        return min(tasks, key=lambda t: self._load_bytes[t])

    def holds_state(self, task: str) -> bool:
        """Whether the present process of a live task holds something that is placed on it."""
        process = self._members.process(task)
        known = (placement.info for placement in self._placements.values())
        return any((info.task, info.process) == (task, process) for info in known)

    def names(self) -> tuple[str, ...]:
        """Return the names of the placed state that snapshots have, in order of placement."""
        return tuple(name for name, placement in self._placements.items() if placement.info.is_saved)

    def holders(self) -> tuple[str, ...]:
        """Return the tasks that hold state that snapshots have, or that are the host of a run."""
        return tuple(dict.fromkeys(info.task for info in self.saved()))

    def saved(self) -> tuple[VariableInfo, ...]:
        """Return the placements that snapshots have, in order: saved state, and the hosts of runs.

        A run's host keeps its rounds (`Sync`) or its bound of staleness (`Async`).
        """
        infos = (placement.info for placement in self._placements.values())
        return tuple(info for info in infos if info.is_saved or info.kind == "run")

    def lost(self) -> tuple[str, ...]:
        """Return the state and runs whose process has left, and whose task has joined as another process since."""
        if self._lost is None:
            found = self.saved()
            now = {task: self._members.process(task) for task in {info.task for info in found}}
            self._lost = tuple(
                info.name for info in found if now[info.task] and info.process not in ("", now[info.task])
            )
        return self._lost

    def restored(self, names: Collection[str]) -> None:
        """Record that the state `names`, and all runs, are held by the present processes of their tasks."""
        for name in [info.name for info in self.saved() if info.kind == "run" or info.name in names]:
            placement = self._placements[name]
            if self._members.process(placement.info.task):
                self._bind(name, placement)
        self._lost = None

    def _bind(self, name: str, placement: _Placement) -> None:
        """Place a name on the present process of its task."""
        info = msgspec.structs.replace(placement.info, process=self._members.process(placement.info.task))
        self._placements[name] = bound = msgspec.structs.replace(placement, info=info)
        self._records.put(_PLACED + name, bound)

    def joined(self, task: str) -> None:
        """Record that a task has joined; its first process holds everything placed on the task before."""
        self._lost = None
        for name in self._before_joining.pop(task, ()):
            placement = self._placements.get(name)
            if placement is not None and (placement.info.task, placement.info.process) == (task, ""):
                self._bind(name, placement)

    def give_up(self, name: str) -> None:
        """Free a name whose state no longer exists; does nothing if the name is free."""
        placement = self._placements.pop(name, None)
        self._lost = None
        if placement is not None:
            self._load_bytes[placement.info.task] -= placement.info.size_bytes
            self._records.drop(_PLACED + name)

    def _add(self, placement: _Placement) -> None:
        info, self._lost = placement.info, None
        self._placements[info.name] = placement
        self._load_bytes[info.task] += info.size_bytes
        if not info.process:
            self._before_joining[info.task].append(info.name)

    def variables(self) -> tuple[VariableInfo, ...]:
        """Return all that is placed, in order of placement: variables, queues, accumulators and runs."""
        return tuple(placement.info for placement in self._placements.values())

    def _loss(self, known: VariableInfo) -> str:
        """Return the error for state whose process has left; empty while the process is live, or has not joined yet."""
        now = self._members.process(known.task)
        if known.process in ("", now):
            return ""
        end = self._members.end_of_process(known.task, known.process)
        return lost_text([_what(known)], known.task, end, is_replaced=bool(now))

    def _found(self, known: VariableInfo, request: PlaceVariable) -> Placed | Failure:
        if (known.kind, known.dtype, known.shape) != (request.kind, request.dtype, request.shape):
            return Failure(
                "VariableError",
                f"{_what(known)} is {_type(known)} and was asked for as {_type(request)}; give one of the two another "
                "name",
            )
        if request.on not in ("", known.task):
            return Failure(
                "DeviceError",
                f"{_what(known)} is on {known.task} and was asked for on {request.on}; say the same place in each "
                "process",
            )
        lost = self._loss(known)
        return Failure("TaskLost", lost) if lost else Placed(known.task, known.process)


#: Remedy for lost state.
REMEDY = "start the whole cluster again; see docs/reliability.md for variables that survive"


def lost_text(names: Sequence[str], task: str, end: str, *, is_replaced: bool) -> str:
    """Return the error for variables whose process, a former one of `task`, has left.

    `end`          when and why it left, or empty
    `is_replaced`  whether another process has joined as the task
    """
    holder, verb, them = short_task_name(task), *(("is", "it") if len(names) == 1 else ("are", "them"))
    left = end or f"the process of {holder} that held {them} has left"
    if not is_replaced:
        return f"{_listed(names)} {verb} on {holder}, which is not there: {left}"
    return f"{_listed(names)} {verb} lost: {left}, and {holder} has been started again without {them}\n  {REMEDY}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def _what(one: VariableInfo | PlaceVariable) -> str:
    return f"{one.kind} {one.name!r}"


def _type(one: VariableInfo | PlaceVariable) -> str:
    """The type, as errors show it; the `dtype` of a queue or an accumulator is its whole type."""
    return f"{one.dtype}{list(one.shape)}" if one.kind == "variable" else one.dtype


#: An error names at most this many lost variables.
MOST_NAMED = 5
_PLACED = "placed/"
#: The process of state whose process is not known, and has ended.
_ENDED = "ended"
