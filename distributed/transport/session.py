"""A session that outlives its sockets: each frame is handled once, in order, or the session ends.

Why: when a socket breaks, neither side knows which frames the other still received. So frames are numbered from 1, each
side acknowledges the number of the last frame that it has received, and retains the frames that the other has not
acknowledged, to resend them over the next socket.

Invariants:

- `receive` returns True for each number once, in order, and False for a number received before. A gap is an error: a
  stream cannot leave one.
- A frame is retained from `send` until the other side acknowledges it, and is returned once, by `acknowledge`, `resume`
  or `end`.
- If this side sends an acknowledgement whenever `ack_due` is true, at most `ack_frames` received frames are
  unacknowledged, and without the last of them fewer than `ack_bytes` bytes.
- No I/O, no clock, no locks: the owner of a session calls it from one thread at a time.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import msgspec

from dflow.distributed.transport.link import OnReleased
from dflow.tracing.errors import WireError

Item = TypeVar("Item")


class Retained(msgspec.Struct, Generic[Item], frozen=True):
    """An item that the other side has not acknowledged; `on_released` is its owner's, for when it is not needed."""

    number: int
    item: Item
    size_bytes: int
    on_released: OnReleased | None = None


class Session(Generic[Item]):
    """One end of a session. `Item` is anything that its owner can resend.

    ack_frames  number of unacknowledged frames received that makes `ack_due` true
    ack_bytes   number of unacknowledged bytes received that makes `ack_due` true
    """

    def __init__(self, *, ack_frames: int = 64, ack_bytes: int = 1 << 20) -> None:
        #: Number of the last frame received; all before it were received too.
        self.received = 0
        #: The items that the other side has not acknowledged, oldest first, and their total size.
        self.retained: deque[Retained[Item]] = deque()
        self.retained_bytes = 0
        self._ack_frames = ack_frames
        self._ack_bytes = ack_bytes
        self._unsaid_frames = 0
        self._unsaid_bytes = 0
        #: Whether to send an acknowledgement now, even without a frame to send: the limit of frames or bytes is met.
        self.ack_due = False
        self._sent = 0
        self._acknowledged = 0

    def send(self, item: Item, size_bytes: int, on_released: OnReleased | None = None) -> int:
        """Retain an item that is about to be sent; return its number. Its frame acknowledges all `received` frames."""
        self._unsaid_frames = self._unsaid_bytes = 0
        self.ack_due = False
        self._sent += 1
        self.retained.append(Retained(self._sent, item, size_bytes, on_released))
        self.retained_bytes += size_bytes
        return self._sent

    def say_received(self) -> int:
        """Return the number to acknowledge in a frame that is about to be sent, and is not retained or sent again."""
        self._unsaid_frames = self._unsaid_bytes = 0
        self.ack_due = False
        return self.received

    def receive(self, number: int, size_bytes: int) -> bool:
        """Count a received frame; return False if it was received before and must not be handled again.

        raises  WireError if frames before it have not been received
        """
        if number <= self.received:
            return False
        if number != self.received + 1:
            raise WireError(f"frame {number} came after frame {self.received}; those in between are missing")
        self.received = number
        self._unsaid_frames += 1
        self._unsaid_bytes += size_bytes
        self.ack_due = self._unsaid_frames >= self._ack_frames or self._unsaid_bytes >= self._ack_bytes
        return True

    def acknowledge(self, upto: int) -> list[Retained[Item]]:
        """Release the frames up to this number, which the other side has, and return those released by this call.

        raises  WireError if no such frame was sent
        """
        if upto > self._sent:
            raise WireError(f"frame {upto} is acknowledged, but only {self._sent} were sent")
        released: list[Retained[Item]] = []
        if upto > self._acknowledged:
            self._acknowledged = upto
            while self.retained and self.retained[0].number <= upto:
                kept = self.retained.popleft()
                self.retained_bytes -= kept.size_bytes
                released.append(kept)
        return released

    def resume(self, peer_received: int) -> list[Retained[Item]]:
        """Go on over a new link, when the other side has all frames up to `peer_received`; as `acknowledge`.

        The owner sends all of `retained` over the new link first.

        raises  WireError if `peer_received` contradicts earlier acknowledgements or was never sent
        """
        if peer_received < self._acknowledged:
            raise WireError(
                f"the other side has {peer_received} frames but had acknowledged {self._acknowledged}; "
                "it has forgotten this session"
            )
        return self.acknowledge(peer_received)

    def end(self) -> list[Retained[Item]]:
        """End the session: return all retained items, and retain none."""
        left = list(self.retained)
        self.retained.clear()
        self.retained_bytes = 0
        return left
