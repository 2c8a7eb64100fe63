"""Admission of connections to a listener while they are unauthenticated.

Why: such a connection costs a thread and some memory until it is authenticated or its deadline passes. If a full
listener refused new connections, one attacker could lock out all tasks by connecting often. So a new connection evicts
an old one instead: the oldest from the source that has the most. A connection is admitted even at the limit of peers,
so that the listener can answer with the reason for the refusal.

Invariants: no I/O and no clock. At most `unauthenticated` connections are unauthenticated, at most `per_source` of one
source, and at most `connections` are peers; a peer is never evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

from dflow.tracing.errors import TransportClosed

Key = TypeVar("Key", bound=Hashable)


class Admission(Generic[Key]):
    """Limits the connections of one listener, by evicting unauthenticated ones and by refusing peers."""

    def __init__(self, *, connections: int, unauthenticated: int, per_source: int) -> None:
        self._connections = connections
        self._most_unauthenticated = unauthenticated
        self._per_source = per_source
        #: The source of each unauthenticated connection, in order of arrival.
        self.unauthenticated: dict[Key, str] = {}
        self.peers: set[Key] = set()

    def arrive(self, connection: Key, source: str) -> tuple[Key, str] | None:
        """Admit a connection from `source`, such as an IP address.

        If a limit is exceeded, return the connection to evict in its place, and the reason.
        """
        evicted = None
        by_source = Counter(self.unauthenticated.values())
        if by_source[source] >= self._per_source:
            why = f"{by_source[source]} connections from there were not authenticated yet"
            evicted = self._evict(source), why
        elif len(self.unauthenticated) >= self._most_unauthenticated:
            most = max(by_source.values())
            greedy = next(one for one in self.unauthenticated.values() if by_source[one] == most)
            evicted = self._evict(greedy), f"{self._most_unauthenticated} connections were not authenticated yet"
        self.unauthenticated[connection] = source
        return evicted

    def believe(self, connection: Key) -> bool:
        """Make an authenticated connection a peer; return False if the limit of peers is reached.

        raises  TransportClosed if it was evicted
        """
        if connection not in self.unauthenticated:
            raise TransportClosed("it was evicted for another connection")
        if len(self.peers) >= self._connections:
            return False
        del self.unauthenticated[connection]
        self.peers.add(connection)
        return True

    def leave(self, connection: Key) -> None:
        """Remove a connection that has ended."""
        self.unauthenticated.pop(connection, None)
        self.peers.discard(connection)

    def _evict(self, source: str) -> Key:
        oldest = next(connection for connection, one in self.unauthenticated.items() if one == source)
        del self.unauthenticated[oldest]
        return oldest
