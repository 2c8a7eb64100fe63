"""What happens to the coordinator, and what it decides to do about it.

Events are facts in the past tense, commands are orders; both are frozen and hold no objects of the transport. A
connection is the number `peer`, a call that wants an answer the number `ask`; the shell gives both out and never
uses one twice. `at_s` is the time of the event in seconds since the coordinator's first start, and never decreases.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflow.distributed.durable_records import Change
from dflow.distributed.messages import AnyMessage


@dataclass(frozen=True)
class Started:
    """The coordinator is up, for the first time or again; the first event of all.

    `cluster` names the cluster from now on, unless it has a name from an earlier start.
    """

    at_s: float
    cluster: str


@dataclass(frozen=True)
class Asked:
    """A message came that wants an answer: one `Reply` to `ask`, now or after a later event."""

    at_s: float
    peer: int
    ask: int
    message: AnyMessage


@dataclass(frozen=True)
class Told:
    """A message came that wants no answer."""

    at_s: float
    peer: int
    message: AnyMessage


@dataclass(frozen=True)
class PeerClosed:
    """A connection has ended; nothing more comes from it or can be sent to it."""

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
    """Write all of the changes down, or none, before any later command is carried out."""

    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Reply:
    """Answer the call `ask`; without effect when its connection has ended."""

    ask: int
    message: AnyMessage


@dataclass(frozen=True)
class Broadcast:
    """Send the message to each of `peers`, without waiting for any."""

    peers: tuple[int, ...]
    message: AnyMessage


@dataclass(frozen=True)
class Disconnect:
    """End a connection whose task is no longer part of the cluster."""

    peer: int
    reason: str


@dataclass(frozen=True)
class Log:
    """Tell whoever reads the coordinator's log."""

    text: str


Command = Persist | Log | Reply | Broadcast | Disconnect
