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
from collections.abc import Hashable
from enum import Enum, auto
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Belief(Enum):
    """The result of a stranger's authentication."""

    PEER = auto()
    EVICTED = auto()
    NO_ROOM = auto()


class Admission(Generic[Key]):
    """The connections of one listener."""

    def __init__(self, *, connections: int, strangers: int, per_source: int) -> None:
        self._connections = connections
        self._most_strangers = strangers
        self._per_source = per_source
        # Each stranger's source, in order of arrival.
        self._strangers: dict[Key, str] = {}
        self._peers: set[Key] = set()

    @property
    def strangers(self) -> list[Key]:
        """The unauthenticated connections, oldest first."""
        return list(self._strangers)

    @property
    def peers(self) -> int:
        """Number of authenticated connections."""
        return len(self._peers)

    def arrive(self, connection: Key, source: str) -> tuple[Key, str] | None:
        """Admit a connection from `source`, such as an IP address; return one to end for it, and why, if necessary."""
        evicted = None
        by_source = Counter(self._strangers.values())
        if by_source[source] >= self._per_source:
            why = f"{by_source[source]} connections from there had not said who they are"
            evicted = self._evict(source), why
        elif len(self._strangers) >= self._most_strangers:
            most = max(by_source.values())
            greedy = next(one for one in self._strangers.values() if by_source[one] == most)
            evicted = self._evict(greedy), f"{self._most_strangers} connections had not said who they are"
        self._strangers[connection] = source
        return evicted

    def believe(self, connection: Key) -> Belief:
        """Make an authenticated stranger a peer, unless it was evicted or the limit of peers is reached."""
        if connection not in self._strangers:
            return Belief.EVICTED
        if len(self._peers) >= self._connections:
            return Belief.NO_ROOM
        del self._strangers[connection]
        self._peers.add(connection)
        return Belief.PEER

    def leave(self, connection: Key) -> None:
        """Remove a connection that has ended."""
        self._strangers.pop(connection, None)
        self._peers.discard(connection)

    def _evict(self, source: str) -> Key:
        oldest = next(connection for connection, one in self._strangers.items() if one == source)
        del self._strangers[oldest]
        return oldest
