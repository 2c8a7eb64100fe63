"""Which task holds which variable, decided once per name.

Invariants:
- a name is placed once; every later asker with the same dtype and shape gets the same task;
- a variable goes to the task with the fewest bytes so far, and to the lowest index among equals, so the same
  requests in the same order give the same placement;
- `near` overrides the spreading: the variable shares the task of the one named, and its bytes count there.
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

    def place(self, request: PlaceVariable, tasks: Sequence[str], jobs: Sequence[str]) -> Placed | Failure:
        """Find or decide the variable's task.

        `tasks`  those of `request.job` that may hold it, by index
        `jobs`   the jobs there are, for the error
        Answers with Failure of kind VariableError when the name has another type or `near` is unknown, and of kind
        DeviceError when there is no task to place it on.
        """
        known = self._placed.get(request.name)
        if known is not None:
            return self._found(known, request)
        if request.near and request.near not in self._placed:
            return Failure("VariableError", _NEAR_UNKNOWN.format(name=request.name, near=request.near))
        if not request.near and not tasks:
            there = ", ".join(jobs) if jobs else "none"
            return Failure("DeviceError", _NO_TASKS.format(name=request.name, job=request.job, jobs=there))
        task = self._placed[request.near].task if request.near else min(tasks, key=lambda t: self._load_bytes[t])
        info = VariableInfo(request.name, request.dtype, request.shape, request.size_bytes, task)
        self._records.put(_PLACED + info.name, _Placement(len(self._placed), info))
        self._add(info)
        return Placed(task)

    def _add(self, info: VariableInfo) -> None:
        self._placed[info.name] = info
        self._load_bytes[info.task] += info.size_bytes

    def variables(self) -> tuple[VariableInfo, ...]:
        """Every placed variable, in order of placement."""
        return tuple(self._placed.values())

    @staticmethod
    def _found(known: VariableInfo, request: PlaceVariable) -> Placed | Failure:
        if (known.dtype, known.shape) == (request.dtype, request.shape):
            return Placed(known.task)
        return Failure(
            "VariableError",
            f"variable {request.name!r} is {known.dtype}{list(known.shape)} and was asked for as "
            f"{request.dtype}{list(request.shape)}; give one of the two another name",
        )


_PLACED = "placed/"
_NEAR_UNKNOWN = "variable {name!r} was to share the task of {near!r}, which is not placed; place {near!r} first"
_NO_TASKS = (
    "variable {name!r} was to be placed on job {job!r}, which has no task that is live or expected; "
    "the jobs there are: {jobs}"
)
