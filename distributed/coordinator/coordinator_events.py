"""Events of the coordinator, and the commands with which it responds.

Events are facts in the past tense, commands are imperatives; both are frozen and hold no objects of the transport. A
connection is the number `peer`, a request the number `ask`; the shell assigns both and never reuses one. `at_s` is the
time of the event in seconds since the coordinator's first start, and never decreases.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflow.distributed.coordinator.durable_records import Change
from dflow.distributed.wire.messages.message import Message


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
