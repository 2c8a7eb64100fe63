"""Which one task does a thing that shall be done once, such as making a first value or writing a summary.

Invariants:
- the first live task that asks is elected, and is told so each time it asks;
- the elected keeps its office while it is live and after a normal end, since it has then done what it was for;
- when it left for any other reason, the next to ask is elected in its place.
"""

from __future__ import annotations

import msgspec

from dflow.distributed.durable_records import DurableRecords
from dflow.distributed.membership import NORMAL_ENDS


class _Office(msgspec.Struct, frozen=True):
    """Who holds it, in which of its lives, and whether that one has failed."""

    task: str
    life: int
    vacant: bool = False


class Elections:
    """The offices of one cluster, which last as `records`."""

    def __init__(self, records: DurableRecords | None = None) -> None:
        self._records = records or DurableRecords()
        self._offices = dict(self._records.load(_OFFICE, _Office))

    def elect(self, what: str, task: str, life: int) -> bool:
        """Whether the live task, in this one of its lives, is the one for `what`."""
        office = self._offices.get(what)
        if office is None or office.vacant:
            office = self._set(what, _Office(task, life))
        return (office.task, office.life) == (task, life)

    def leave(self, life: int, reason: str) -> None:
        """The task is no longer live."""
        for what, office in self._offices.items():
            if office.life == life and reason not in NORMAL_ENDS:
                self._set(what, msgspec.structs.replace(office, vacant=True))

    def _set(self, what: str, office: _Office) -> _Office:
        self._offices[what] = office
        self._records.put(_OFFICE + what, office)
        return office


_OFFICE = "office/"
