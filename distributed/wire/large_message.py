"""Messages that grow with the cluster, sent as a compressed payload when they are large: a message alone has a limit
that ten thousand tasks would exceed. A message to many tasks is encoded once, and so is a roster for many joins.
"""

from __future__ import annotations

import zlib

from dflow.distributed.wire.codec import Payload, decode_message, encode_message
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.roster import Packed, Roster, RosterChange, change_between, changed_roster
from dflow.distributed.wire.messages.status import Status
from dflow.tracing.errors import WireError

LARGE_BYTES = 1 << 16
#: Limit of an unpacked payload.
MOST_BYTES = 64 << 20
#: Rosters with fewer tasks are packed individually.
LARGE_ROSTER = 256
#: When more than this fraction of the tasks has changed, the roster is encoded again.
_CHANGED_PART = 1 / 16
#: The fastest compression.
_LEVEL = 1


def pack(message: Message, *, goes_to_many: bool = False) -> tuple[Message, bytes]:
    """Return the message to send and its payload.

    A roster, roster change or status becomes a `Packed` with a compressed payload if it is large or `goes_to_many`;
    every other message is returned as it is, with an empty payload.
    """
    if isinstance(message, (Roster, RosterChange, Status)):
        data = encode_message(message)
        if goes_to_many or len(data) > LARGE_BYTES:
            return Packed(), zlib.compress(data, _LEVEL)
    return message, b""


class RosterPacker:
    """Packs the rosters of one coordinator process.

    A large roster is sent as an earlier roster, whose encoding is cached, and the changes since.
    """

    def __init__(self) -> None:
        self._base = Roster((), ())
        self._payload = b""

    def pack(self, roster: Roster) -> tuple[Message, bytes]:
        """Return the message to send and its payload."""
        if len(roster.tasks) + len(roster.expected) < LARGE_ROSTER:
            return pack(roster)
        change = change_between(self._base, roster)
        if not self._payload or len(change.entries) + len(change.dropped) > _CHANGED_PART * len(roster.tasks):
            self._base, self._payload = roster, zlib.compress(encode_message(roster), _LEVEL)
            change = change_between(roster, roster)
        return Packed(change), self._payload


def unpack(message: Message, payload: Payload) -> Message:
    """Undo `pack`: return the original message. Raises WireError if the payload is malformed."""
    if not isinstance(message, Packed):
        return message
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(payload, MOST_BYTES)
    except zlib.error as error:
        raise WireError(f"a packed message cannot be decompressed: {error}") from None
    if not unpacker.eof:
        raise WireError(f"a packed message ends early or is of more than {MOST_BYTES} bytes")
    packed = decode_message(data)
    if message.change is None:
        return packed
    if isinstance(packed, Roster):
        return changed_roster(packed, message.change)
    raise WireError(f"the payload with a change of a roster is a {type(packed).__name__}; expected a Roster")
