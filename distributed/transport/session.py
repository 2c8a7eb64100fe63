"""A conversation that outlives the sockets it runs over: each frame is handled once, in order, or the session ends.

Why: a socket that breaks tells neither side what the other still got. So frames are numbered from 1, each side says
up to which number it has all, and what the other has not is kept and sent again over the next socket.

Invariants:

- `receive` says True to each number once, in order; what it is told twice it refuses, and a number that leaves a gap
  is an error, since a stream cannot leave one.
- A frame is retained from `send` until the other side has said that it has it, and given back once, by `acknowledge`
  or `resume`.
- While frames come, at most `ack_frames` of them and fewer than `ack_bytes` more than the last frame are not yet
  acknowledged by what this side sends.
- No I/O, no clock, no locks: whoever owns a session calls it from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, NamedTuple, TypeVar

import msgspec

from dflow.tracing.errors import WireError

Item = TypeVar("Item")


class Resumption(NamedTuple, Generic[Item]):
    """What a new link changes: frames the other side turned out to have, and those to send again, oldest first."""

    released: list[Item]
    again: list[Item]


class _Retained(msgspec.Struct, Generic[Item], frozen=True):
    number: int
    item: Item
    size_bytes: int


class Session(Generic[Item]):
    """One end. `Item` is whatever its owner can send again; what has to be sent is said by return values.

    ack_frames  after so many frames that nothing sent has acknowledged, `ack_due` is true
    ack_bytes   and after so many bytes
    """

    def __init__(self, *, ack_frames: int = 64, ack_bytes: int = 1 << 20) -> None:
        self._ack_frames = ack_frames
        self._ack_bytes = ack_bytes
        self._retained: deque[_Retained[Item]] = deque()
        self._unsaid_frames = 0
        self._unsaid_bytes = 0
        self._sent = 0
        self._acknowledged = 0
        self._received = 0
        self._unacknowledged_bytes = 0

    @property
    def sent(self) -> int:
        """The number of the last frame sent."""
        return self._sent

    @property
    def received(self) -> int:
        """All frames up to this number have arrived here."""
        return self._received

    @property
    def unacknowledged_bytes(self) -> int:
        """The size of the frames that are retained."""
        return self._unacknowledged_bytes

    @property
    def unacknowledged_frames(self) -> int:
        """How many frames are retained."""
        return len(self._retained)

    @property
    def ack_due(self) -> bool:
        """Whether so much has come since this side last acknowledged that it should, even with nothing to send."""
        return self._unsaid_frames >= self._ack_frames or self._unsaid_bytes >= self._ack_bytes

    def send(self, item: Item, size_bytes: int) -> int:
        """Retain what is about to be sent; returns its number."""
        self._sent += 1
        self._retained.append(_Retained(self._sent, item, size_bytes))
        self._unacknowledged_bytes += size_bytes
        return self._sent

    def say_received(self) -> int:
        """The number to write as an acknowledgement into the frame that is about to be sent."""
        self._unsaid_frames = 0
        self._unsaid_bytes = 0
        return self._received

    def receive(self, number: int, size_bytes: int) -> bool:
        """Whether the frame of this number is to be handled; False when it was before.

        raises  WireError if frames before it have not come
        """
        if number <= self._received:
            return False
        if number != self._received + 1:
            raise WireError(f"frame {number} came after frame {self._received}; those in between are missing")
        self._received = number
        self._unsaid_frames += 1
        self._unsaid_bytes += size_bytes
        return True

    def acknowledge(self, upto: int) -> list[Item]:
        """The other side has all frames up to this number; returns those that need no longer be retained.

        raises  WireError if no such frame was sent
        """
        if upto > self._sent:
            raise WireError(f"frame {upto} is acknowledged, but only {self._sent} were sent")
        released: list[Item] = []
        if upto > self._acknowledged:
            self._acknowledged = upto
            while self._retained and self._retained[0].number <= upto:
                kept = self._retained.popleft()
                self._unacknowledged_bytes -= kept.size_bytes
                released.append(kept.item)
        return released

    def resume(self, peer_received: int) -> Resumption[Item]:
        """There is a new link, and the other side has all frames up to `peer_received`.

        raises  WireError if that cannot be the session that this is the other end of
        """
        if peer_received < self._acknowledged:
            raise WireError(
                f"the other side has {peer_received} frames but had acknowledged {self._acknowledged}; "
                "it has forgotten this session"
            )
        released = self.acknowledge(peer_received)
        return Resumption(released, [kept.item for kept in self._retained])

    def end(self) -> list[Item]:
        """The session is over: returns all that is retained, and retains nothing."""
        left = [kept.item for kept in self._retained]
        self._retained.clear()
        self._unacknowledged_bytes = 0
        return left
