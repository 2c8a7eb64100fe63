"""Messages that grow with the cluster, sent as a payload when they are large: a message alone has a limit that ten
thousand tasks would break. What goes to many is encoded once for all of them.
"""

from __future__ import annotations

from dflow.distributed.codec import Payload, decode_message, encode_message
from dflow.distributed.messages import AnyMessage, Packed, Roster, RosterChange, Status

LARGE_BYTES = 1 << 16


def pack(message: AnyMessage, *, goes_to_many: bool = False) -> tuple[AnyMessage, bytes]:
    """What to send for `message`: itself, or a `Packed` and its payload."""
    if not isinstance(message, (Roster, RosterChange, Status)):
        return message, b""
    data = encode_message(message)
    return (Packed(), data) if goes_to_many or len(data) > LARGE_BYTES else (message, b"")


def unpack(message: AnyMessage, payload: Payload) -> AnyMessage:
    """What `pack` was given; raises WireError when the payload is no message."""
    return decode_message(payload) if isinstance(message, Packed) else message
