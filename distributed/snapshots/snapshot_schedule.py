"""When the next snapshot begins. A pure function of events."""

from __future__ import annotations

import math
from collections.abc import Collection

from dflow.distributed.coordinator.variable_directory import MOST_NAMED

#: Limit of the time until a pause for a snapshot is reached, in s.
PAUSE_S = 10.0
#: Time to the next attempt at a snapshot after one that failed, in s: it doubles with each failure in a row, up to the
#: interval between snapshots. After a pause that was not reached, at least the second time, since other workers waited.
RETRY_S, AFTER_PAUSE_S = 1.0, 2 * PAUSE_S
#: A name that attempts lack for this time is logged, in s: a program traces before it creates its variables.
LACKING_S = 30.0


class SnapshotSchedule:
    """Decides when the next snapshot of one cluster begins.

    every_s  time between two snapshots, in s; 0 for none
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        #: Beginning of the newest attempt.
        self.began_s = -math.inf
        #: Names in the newest complete snapshot.
        self._names: Collection[str] = ()
        #: Number of reports of changed state: in all, and in the newest complete snapshot.
        self.changes = self.saved_changes = 0
        #: Number of attempts that failed since the newest complete snapshot.
        self.failures = 0
        #: Time before which none begins.
        self._not_before_s = -math.inf
        #: When the attempts since the newest complete snapshot began to lack each name; whether the log has them.
        self._lacking_s: dict[str, float] = {}
        self._is_told = False

    def is_due(self, at_s: float, names: Collection[str]) -> bool:
        """Whether a snapshot of the state of these names begins now: `every_s` after the newest attempt.

        New names and changed state are saved immediately, since a return would lose them. No snapshot is due in the
        delay after an attempt that failed.
        """
        is_new = names != self._names or self.changes > self.saved_changes
        return self.is_allowed(at_s) and (is_new or at_s - self.began_s >= self.every_s)

    def is_allowed(self, at_s: float) -> bool:
        """Whether the delay after an attempt that failed is over."""
        return at_s >= self._not_before_s

    def allow(self) -> None:
        """End the delay after an attempt that failed."""
        self._not_before_s = -math.inf

    def failed(self, at_s: float, least_s: float) -> float:
        """Record an attempt that failed; return the delay of the next one in s, at least `least_s`."""
        retry_s: float = max(least_s, min(self.every_s, RETRY_S * 2**self.failures))
        self.failures += 1
        self._not_before_s = at_s + retry_s
        return retry_s

    def lacking(self, names: Collection[str], at_s: float) -> str:
        """Record the names that an attempt lacked. Once, return a text of those lacking for `LACKING_S`; else empty."""
        self._lacking_s = {name: self._lacking_s.get(name, at_s) for name in names}
        found = [name for name, since_s in self._lacking_s.items() if at_s - since_s >= LACKING_S and not self._is_told]
        if not found:
            return ""
        self._is_told = True
        was = "was" if len(found) == 1 else "were"
        return f"{', '.join(found[:MOST_NAMED])} {was} placed, and not created in {LACKING_S:g} s"

    def complete(self, names: Collection[str], changes: int) -> None:
        """Record that a snapshot with these names, and with this number of changes, is complete."""
        self._lacking_s, self._is_told = {}, False
        self._names, self.saved_changes, self.failures = names, changes, 0

    def returned(self, names: Collection[str]) -> None:
        """Record the names that are left after a return to a snapshot, so that they do not count as new."""
        self._names = names
