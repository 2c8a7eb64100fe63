"""Decisions that all workers of a run follow, such as whether it ends: the first value that a worker gives counts.

Invariant: a decision never changes, so a worker that is started again and comes to the same point gets the same one.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Received, Requests
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.coordination import Decided, DecideOnce

_DECISION = "decision/"


class _Decision(msgspec.Struct, frozen=True):
    value: str


class Decisions(CoordinatorPart):
    """The decisions of one cluster, kept in `records`."""

    requests: ClassVar[Requests[Decisions]] = HandlerTable()

    @classmethod
    def of(cls, core: CoordinatorCore) -> Decisions:
        """Make the part."""
        return cls(core.records)

    def __init__(self, records: DurableRecords) -> None:
        self._records = records
        self._values = {what: found.value for what, found in records.load(_DECISION, _Decision)}

    def decide(self, what: str, value: str | None) -> str | None:
        """Return what was decided, else decide for `value` and return it; None if there is neither."""
        if what not in self._values and value is not None:
            self._values[what] = value
            self._records.put(_DECISION + what, _Decision(value))
        return self._values.get(what)

    @requests.handles(DecideOnce)
    def _decide(self, request: DecideOnce, received: Received) -> Decided:
        return Decided(self.decide(request.what, request.value))
