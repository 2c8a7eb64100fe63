"""The exchange of `Hello` that opens a connection: names, protocol version, and the session to begin or resume.

The side that dialled sends first. The answer to a `Hello` that resumes a session names the same session, or none if the
session is unknown: then that side has ended it, or has restarted.
"""

from __future__ import annotations

from dflow.distributed.transport.framing import pack_header, read_first
from dflow.distributed.transport.link import Frame, Kind, Limits
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.stream import Deadline, Stream, send_by
from dflow.distributed.wire.codec import decode_message, encode_message
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION, Failure, Hello
from dflow.tracing.errors import TransportClosed, WireError

_LONGEST_NAME = 256


class Refused(TransportClosed):
    """The other side accepts no connection now; the text has its reason and the remedy."""


def say_hello(stream: Stream, hello: Hello | Failure, deadline: Deadline) -> None:
    """Send a `Hello`, or the reason for refusing one; raises DeadlineExceeded or OSError."""
    frame = Frame(Kind.NOTIFY, 0, encode_message(hello), b"")
    parts = [memoryview(pack_header(frame)), memoryview(frame.meta)]
    send_by(stream, parts, deadline, f"a Hello could not be sent within {deadline.timeout_s:g} s")


def hear_hello(secured: Secured, security: SecurityPolicy, limits: Limits, deadline: Deadline) -> Hello:
    """Receive the other side's `Hello`; its version is left to `check_version`.

    raises  WireError if it is no valid `Hello`; SecurityError if either side refuses the other's name; Refused if the
            other side has no room; DeadlineExceeded; TransportClosed; OSError
    """
    hello = decode_message(read_first(secured.stream, limits, deadline))
    if isinstance(hello, Failure):
        error = error_of(hello, "the other side")
        raise Refused(str(error)) if isinstance(error, TransportClosed) else error
    if not isinstance(hello, Hello):
        raise WireError(f"the first message is a {type(hello).__name__}; a connection starts with a Hello")
    if not (0 < len(hello.name) <= _LONGEST_NAME and hello.name.isprintable()):
        raise WireError(f"a name of {len(hello.name)} characters; expected 1 to {_LONGEST_NAME} printable ones")
    security.may_be_called(secured.identity, hello.name)
    return hello


def check_version(hello: Hello) -> None:
    """Raise WireError if the other side uses another version of the protocol."""
    if hello.version != PROTOCOL_VERSION:
        raise WireError(
            f"{hello.name} speaks protocol version {hello.version} and this side version {PROTOCOL_VERSION}; "
            "install the same dflow on both"
        )
