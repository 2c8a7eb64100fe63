"""Events of the coordinator, the commands with which it responds, and the log of the newest events.

Events are facts in the past tense, commands are imperatives; both are frozen and hold no objects of the transport. A
connection is the number `peer`, a request the number `ask`; the shell assigns both and never reuses one. `at_s` is the
time of the event in seconds since the coordinator's first start, and never decreases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from dflow.distributed.coordinator.durable_records import Change
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Heartbeat

LOG_EVENTS = 10_000
#: The log is bounded in bytes too: a message may have a megabyte, and ten thousand of these would fill the memory.
LOG_BYTES = 8 << 20
#: Approximate size of an event in addition to its message.
_EVENT_BYTES = 200

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Started:
    """The coordinator has started, for the first time or again; always the first event.

    `cluster` becomes the cluster's id, unless it has one from an earlier start.
    """

    at_s: float
    cluster: str


@dataclass(frozen=True)
class Asked:
    """A request arrived: it needs one `SendReply` to `ask`, now or after a later event."""

    at_s: float
    peer: int
    ask: int
    message: Message


@dataclass(frozen=True)
class Told:
    """A notification arrived."""

    at_s: float
    peer: int
    message: Message


@dataclass(frozen=True)
class PeerClosed:
    """A connection has ended; nothing more arrives from it or can be sent to it."""

    at_s: float
    peer: int
    reason: str


@dataclass(frozen=True)
class Ticked:
    """Time has passed."""

    at_s: float


Event = Started | Asked | Told | PeerClosed | Ticked


@dataclass(frozen=True)
class Persist:
    """Write all of the changes, or none, before any later command is carried out."""

    changes: tuple[Change, ...]


@dataclass(frozen=True)
class SendReply:
    """Answer the request `ask`; ignored when its connection has ended."""

    ask: int
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """Send the message to each of `peers`, without waiting for any."""

    peers: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Disconnect:
    """Close a connection that no longer belongs to a task, if it is still open."""

    peer: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Log a warning; `kind` is that of its `ClusterEvent`."""

    text: str
    kind: str = field(default="log", compare=False)


Command = Persist | Log | SendReply | Broadcast | Disconnect


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
