"""The newest events of the coordinator, bounded in number and in bytes.

Why: a message may have a megabyte, and ten thousand such messages of one peer would fill the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from dflow.distributed.coordinator.coordinator_events import Asked, Event, Told
from dflow.distributed.wire.messages.roster import Heartbeat

LOG_EVENTS = 10_000
LOG_BYTES = 8 << 20
#: Approximate size of an event in addition to its message.
_EVENT_BYTES = 200

_ENCODER = msgspec.msgpack.Encoder()


class EventLog:
    """Iterable of the kept events, oldest first; heartbeats are kept without their traffic."""

    def __init__(self, most: int = LOG_EVENTS, most_bytes: int = LOG_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[tuple[Event, int]] = deque()
        #: Approximate size of the kept events.
        self.size_bytes = 0

    def append(self, event: Event) -> None:
        """Keep the event, and drop the oldest ones beyond the limits."""
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
