"""Who may wait at the door: connections that have not said yet who they are.

Why: a stranger costs a thread and some memory until it is believed or its time is up. Were the door simply closed when
full, one stranger could keep everyone out by knocking often; so a newcomer takes the place of the one who has waited
longest, of those who come from where most come from.

Invariants: no I/O and no clock. There are never more strangers than `strangers`, never more from one source than
`per_source`, and never more connections in all than `connections`. A newcomer is refused only when all connections are
those of peers; a peer is never evicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """Whether the newcomer may wait, and which strangers have to go for it; `why` is said to the log."""

    admitted: bool
    evicted: tuple[int, ...] = ()
    why: str = ""


class Admission:
    """The connections of one listener, by number."""

    def __init__(self, *, connections: int, strangers: int, per_source: int) -> None:
        self._connections = connections
        self._most_strangers = strangers
        self._per_source = per_source
        # In order of their arrival.
        self._strangers: dict[int, str] = {}
        self._peers: set[int] = set()

    @property
    def strangers(self) -> int:
        """How many wait."""
        return len(self._strangers)

    @property
    def peers(self) -> int:
        """How many have been believed."""
        return len(self._peers)

    def arrive(self, number: int, source: str) -> Decision:
        """A connection came from `source`, such as an IP address."""
        if len(self._peers) >= self._connections:
            return Decision(False, why=f"{len(self._peers)} of {self._connections} connections are in use")
        evicted, why = self._evict_for(source)
        self._strangers[number] = source
        return Decision(True, evicted, why)

    def believe(self, number: int) -> bool:
        """The stranger has shown who it is; False when it was evicted meanwhile."""
        if self._strangers.pop(number, None) is None:
            return False
        self._peers.add(number)
        return True

    def leave(self, number: int) -> None:
        """The connection has ended."""
        self._strangers.pop(number, None)
        self._peers.discard(number)

    def _evict_for(self, source: str) -> tuple[tuple[int, ...], str]:
        by_source = Counter(self._strangers.values())
        if by_source[source] >= self._per_source:
            return self._evict(source), f"{by_source[source]} connections from there had not said who they are"
        count = len(self._strangers)
        if count < self._most_strangers and count + len(self._peers) < self._connections:
            return (), ""
        most = max(by_source.values(), default=0)
        greedy = next((one for one in self._strangers.values() if by_source[one] == most), source)
        return self._evict(greedy), f"{count} connections had not said who they are"

    def _evict(self, source: str) -> tuple[int, ...]:
        oldest = next((number for number, one in self._strangers.items() if one == source), None)
        if oldest is None:
            return ()
        del self._strangers[oldest]
        return (oldest,)
