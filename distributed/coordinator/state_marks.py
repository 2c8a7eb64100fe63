"""Marks in the history of a coordinator's state, with which its clients detect that the newest changes were lost.

Why: a state file can lose its newest changes without an error, as when a bit flips in SQLite's write-ahead log. The
coordinator that starts from it would assign the same steps, elections and placements again. Its clients can detect
this: answers carry a `Mark`, and a task that rejoins sends the newest one that it has seen.

Invariants: `revision` counts the writes of the state since the cluster began; an answer carries the mark of a write
that was made before it; `missing` is empty for each mark given by a coordinator with this history.
"""

from __future__ import annotations

import msgspec

from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.wire.messages.message import Mark


class _Start(msgspec.Struct, frozen=True):
    """A start of the coordinator, and the revision that it found."""

    name: str
    found: int


class StateMarks:
    """History of the coordinator's starts and writes, kept in `records`.

    It tells whether this state lacks changes that a client has seen.
    """

    def __init__(self, records: DurableRecords) -> None:
        self._records = records
        self._starts = [start for _, start in records.load(_START, _Start)]
        self._revision = records.load_one(REVISION, {"revision": 0})["revision"]

    @property
    def newest(self) -> Mark:
        """The mark of the newest write; an empty one before the first start."""
        return Mark(self._starts[-1].name, self._revision) if self._starts else Mark()

    def started(self, name: str) -> None:
        """Record a start of the coordinator, under a unique `name`."""
        start = _Start(name, self._revision)
        self._records.put(f"{_START}{len(self._starts):09d}", start)
        self._starts.append(start)

    def written(self) -> None:
        """Count a write of the state."""
        self._revision += 1
        self._records.put(REVISION, {"revision": self._revision})

    def missing(self, mark: Mark) -> str:
        """Describe the changes up to `mark` that this state lacks; empty if it has all."""
        if not mark.start:
            return ""
        positions = [position for position, start in enumerate(self._starts) if start.name == mark.start]
        if not positions:
            return f"it has no change since start {mark.start}"
        later = self._starts[positions[0] + 1 :]
        last = later[0].found if later else self._revision
        return "" if mark.revision <= last else f"of the changes up to {mark.revision} it has those up to {last}"


_START = "start/"
REVISION = "revision"
