"""Election of one task for an action that must happen once, such as writing a summary.

Invariants:
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
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import NORMAL_ENDS, ReleaseTask
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.coordination import Elected, ElectOnce


class _Office(msgspec.Struct, frozen=True):
    """The elected task, the number of its life, and whether that has failed."""

    task: str
    life: int
    vacant: bool = False


class Elections(CoordinatorPart):
    """The elections of one cluster, kept in `records`."""

    requests: ClassVar[Requests[Elections]] = HandlerTable()

    @classmethod
    def of(cls, core: CoordinatorCore) -> Elections:
        """Make the part."""
        return cls(core.records)

    def __init__(self, records: DurableRecords) -> None:
        self._records = records
        self._offices = dict(self._records.load(_OFFICE, _Office))

    def elect(self, what: str, task: str, life: int) -> bool:
        """Return whether the live task, in this life, is elected for `what`; elect it if there is no other."""
        office = self._offices.get(what)
        if office is None or office.vacant:
            office = self._set(what, _Office(task, life))
        return (office.task, office.life) == (task, life)

    @requests.handles(ElectOnce)
    def _elect(self, request: ElectOnce, received: Received) -> Elected:
        return Elected(self.elect(request.what, request.task, received.life))

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float, core: CoordinatorCore) -> Sequence[Command]:
        """Void the elections of tasks that have failed."""
        for one in left:
            self.leave(one.life, one.reason)
        return []

    def leave(self, life: int, reason: str) -> None:
        """Void the elections of a life that has left, unless by a normal end."""
        for what, office in self._offices.items():
            if office.life == life and reason not in NORMAL_ENDS:
                self._set(what, msgspec.structs.replace(office, vacant=True))

    def _set(self, what: str, office: _Office) -> _Office:
        self._offices[what] = office
        self._records.put(_OFFICE + what, office)
        return office


_OFFICE = "office/"
