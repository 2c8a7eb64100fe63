"""Admission of connections to a listener while they are unauthenticated (strangers).

Why: a stranger costs a thread and some memory until it is authenticated or its deadline passes. If a full listener
refused new connections, one attacker could lock out all tasks by connecting often. So a new connection evicts an old
one instead: the oldest from the source that has the most. A stranger is admitted even at the limit of peers, so that
the listener can answer with the reason for the refusal.

Invariants: no I/O and no clock. There are never more strangers than `strangers`, never more from one source than
`per_source`, and never more peers than `connections`; a peer is never evicted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True)
class Decision:
    """The strangers to evict for a new connection; `why` goes to the log."""

    evicted: tuple[int, ...] = ()
    why: str = ""


class Belief(Enum):
    """The result of a stranger's authentication."""

    PEER = auto()
    EVICTED = auto()
    NO_ROOM = auto()


class Admission:
    """The connections of one listener, by number."""

    def __init__(self, *, connections: int, strangers: int, per_source: int) -> None:
        self._connections = connections
        self._most_strangers = strangers
        self._per_source = per_source
        # Each stranger's source, by number, in order of arrival.
        self._strangers: dict[int, str] = {}
        self._peers: set[int] = set()

    @property
    def strangers(self) -> int:
        """Number of unauthenticated connections."""
        return len(self._strangers)

    @property
    def peers(self) -> int:
        """Number of authenticated connections."""
        return len(self._peers)

    def arrive(self, number: int, source: str) -> Decision:
        """Admit a new connection from `source`, such as an IP address; return the connections to end for it."""
        decision = self._make_room(source)
        self._strangers[number] = source
        return decision

    def believe(self, number: int) -> Belief:
        """Make an authenticated stranger a peer, unless it was evicted or the limit of peers is reached."""
        if number not in self._strangers:
            return Belief.EVICTED
        if len(self._peers) >= self._connections:
            return Belief.NO_ROOM
        del self._strangers[number]
        self._peers.add(number)
        return Belief.PEER

    def leave(self, number: int) -> None:
        """Remove a connection that has ended."""
        self._strangers.pop(number, None)
        self._peers.discard(number)

    def _make_room(self, source: str) -> Decision:
        by_source = Counter(self._strangers.values())
        if by_source[source] >= self._per_source:
            why = f"{by_source[source]} connections from there had not said who they are"
            return Decision(self._evict(source), why)
        count = len(self._strangers)
        if count < self._most_strangers:
            return Decision()
        most = max(by_source.values(), default=0)
        greedy = next((one for one in self._strangers.values() if by_source[one] == most), source)
        return Decision(self._evict(greedy), f"{count} connections had not said who they are")

    def _evict(self, source: str) -> tuple[int, ...]:
        oldest = next((number for number, one in self._strangers.items() if one == source), None)
        if oldest is None:
            return ()
        del self._strangers[oldest]
        return (oldest,)
