"""Decisions made once for all tasks: values, such as whether a run ends, and the task that does something alone.

Invariants:
- the first value that a worker gives counts and never changes, so that a worker that is started again and comes to the
  same point gets the same one;
- the first live task that asks is elected, and gets the same answer each time it asks;
- an elected task stays elected while it is live and after a normal end, since it has then done the action;
- when it left for any other reason, the next task that asks is elected instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Command
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received, Requests
from dflow.distributed.coordinator.membership import NORMAL_ENDS, ReleaseTask
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.coordination import Decided, DecideOnce, Elected, ElectOnce


class _Office(msgspec.Struct, frozen=True):
    """The elected task and its life; `vacant` if that life failed, so that another task may be elected."""

    task: str
    life: int
    vacant: bool = False


class Decisions(CoordinatorPart):
    """The decisions and elections of one cluster, kept in its records."""

    requests: ClassVar[Requests[Decisions]] = HandlerTable()

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._records = records = core.records
        self._values = {what: found["value"] for what, found in records.load(_DECISION, dict[str, str])}
        self._offices = dict(records.load(_OFFICE, _Office))

    @requests.handles(DecideOnce)
    def _decide(self, request: DecideOnce, received: Received) -> Decided:
        what, value = request.what, request.value
        if what not in self._values and value is not None:
            self._values[what] = value
            self._records.put(_DECISION + what, {"value": value})
        return Decided(self._values.get(what))

    @requests.handles(ElectOnce)
    def _elect(self, request: ElectOnce, received: Received) -> Elected:
        return Elected(self.elect(request.what, request.task, received.life))

    def elect(self, what: str, task: str, life: int) -> bool:
        """Return whether the live task, in this life, is elected for `what`; elect it if there is no other."""
        office = self._offices.get(what)
        if office is None or office.vacant:
            office = self._set(what, _Office(task, life))
        return (office.task, office.life) == (task, life)

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> Sequence[Command]:
        """Void the elections of tasks that have left, unless by a normal end."""
        failed = {one.life for one in left if one.reason not in NORMAL_ENDS}
        for what, office in self._offices.items():
            if office.life in failed:
                self._set(what, msgspec.structs.replace(office, vacant=True))
        return []

    def _set(self, what: str, office: _Office) -> _Office:
        self._offices[what] = office
        self._records.put(_OFFICE + what, office)
        return office


_DECISION = "decision/"
_OFFICE = "office/"
