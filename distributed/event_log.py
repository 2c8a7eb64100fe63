"""The newest events of the coordinator, which are bounded in number and in bytes.

Why: a message may have a megabyte, and who sends many such should not have ten thousand of them kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from dflow.distributed.coordinator_events import Asked, Event, Told
from dflow.distributed.messages import Heartbeat

LOG_EVENTS = 10_000
LOG_BYTES = 8 << 20
#: What an event takes beside its message, about.
_EVENT_BYTES = 200

_ENCODER = msgspec.msgpack.Encoder()


class EventLog:
    """Iterating gives the events that are kept, the oldest first; heartbeats are without the traffic that they tell."""

    def __init__(self, most: int = LOG_EVENTS, most_bytes: int = LOG_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[tuple[Event, int]] = deque()
        #: What those that are kept take, about.
        self.size_bytes = 0

    def append(self, event: Event) -> None:
        """Keep the event, and no longer the oldest if these are too many now."""
        if isinstance(event, Told) and isinstance(event.message, Heartbeat):
            event = Told(event.at_s, event.peer, msgspec.structs.replace(event.message, traffic=()))
        size_bytes = _EVENT_BYTES
        if isinstance(event, Asked | Told):
            size_bytes += len(_ENCODER.encode(event.message))
        self._kept.append((event, size_bytes))
        self.size_bytes += size_bytes
        while len(self._kept) > self._most or self.size_bytes > self._most_bytes:
            self.size_bytes -= self._kept.popleft()[1]

    def __iter__(self) -> Iterator[Event]:
        return (event for event, _ in self._kept)

    def __len__(self) -> int:
        return len(self._kept)
