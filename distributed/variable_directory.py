"""Which task holds which variable, queue or accumulator, decided once per name.

Invariants:
- a name is placed once; every later asker with the same dtype and shape gets the same task;
- a variable goes to the task with the fewest bytes so far, and to the lowest index among equals, so the same
  requests in the same order give the same placement;
- `near` overrides the spreading: the variable shares the task of the one named, and its bytes count there; so does a
  stated task;
- a name that was given up is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from dflow.distributed.durable_records import DurableRecords
from dflow.distributed.messages import Failure, Placed, PlaceVariable, VariableInfo


class _Placement(msgspec.Struct, frozen=True):
    """The `number`-th placement."""

    number: int
    info: VariableInfo


class VariableDirectory:
    """The placed variables of one cluster, which last as `records`."""

    def __init__(self, records: DurableRecords | None = None) -> None:
        self._records = records or DurableRecords()
        self._placed: dict[str, VariableInfo] = {}
        self._load_bytes: Counter[str] = Counter()
        known = [placement for _, placement in self._records.load(_PLACED, _Placement)]
        for placement in sorted(known, key=lambda placement: placement.number):
            self._add(placement.info)
        self._next_number = 1 + max((placement.number for placement in known), default=-1)

    def place(self, request: PlaceVariable, tasks: Sequence[str], jobs: Sequence[str]) -> Placed | Failure:
        """Find or decide the variable's task.

        `tasks`  those of `request.job` that may hold it, by index
        `jobs`   the jobs there are, for the error
        Answers with Failure of kind VariableError when the name has another type or `near` is unknown, and of kind
        DeviceError when there is no task to place it on, or it is on another than the one stated.
        """
        known = self._placed.get(request.name)
        if known is not None:
            return self._found(known, request)
        if request.near and request.near not in self._placed:
            return Failure("VariableError", _NEAR_UNKNOWN.format(what=_what(request), near=request.near))
        if not request.near and not tasks:
            there = ", ".join(jobs) if jobs else "none"
            return Failure("DeviceError", _NO_TASKS.format(what=_what(request), job=request.job, jobs=there))
        if request.on and request.on not in tasks:
            there = ", ".join(tasks)
            return Failure("DeviceError", _NOT_THERE.format(what=_what(request), task=request.on, tasks=there))
        task = request.on or self._near(request) or min(tasks, key=lambda t: self._load_bytes[t])
        info = VariableInfo(request.name, request.dtype, request.shape, request.size_bytes, task, request.kind)
        self._records.put(_PLACED + info.name, _Placement(self._next_number, info))
        self._next_number += 1
        self._add(info)
        return Placed(task)

    def give_up(self, name: str) -> None:
        """What had this name is gone; nothing happens when nothing had."""
        info = self._placed.pop(name, None)
        if info is not None:
            self._load_bytes[info.task] -= info.size_bytes
            self._records.drop(_PLACED + name)

    def _near(self, request: PlaceVariable) -> str:
        return self._placed[request.near].task if request.near else ""

    def _add(self, info: VariableInfo) -> None:
        self._placed[info.name] = info
        self._load_bytes[info.task] += info.size_bytes

    def variables(self) -> tuple[VariableInfo, ...]:
        """Every placed variable, in order of placement."""
        return tuple(self._placed.values())

    @staticmethod
    def _found(known: VariableInfo, request: PlaceVariable) -> Placed | Failure:
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
        return Placed(known.task)


def _what(one: VariableInfo | PlaceVariable) -> str:
    return f"{one.kind} {one.name!r}"


def _type(one: VariableInfo | PlaceVariable) -> str:
    """The type as messages say it; that of a queue or an accumulator is all in its `dtype`."""
    return f"{one.dtype}{list(one.shape)}" if one.kind == "variable" else one.dtype


_PLACED = "placed/"
_NEAR_UNKNOWN = "{what} was to share the task of {near!r}, which is not placed; place {near!r} first"
_NO_TASKS = (
    "{what} was to be placed on job {job!r}, which has no task that is live or expected; the jobs there are: {jobs}"
)
_NOT_THERE = "{what} was to be placed on {task}, which is none of the tasks there: {tasks}"
