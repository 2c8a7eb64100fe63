"""Dialling a listener: for a new session, and for the next stream of a session whose stream broke.

Invariants: a session is resumed only with the process that began it. It is abandoned after `Limits.resume_s`, when
nothing listens at its address, or when the other side does not know it any more. A session whose streams break
`_MOST_IN_A_ROW` times without a frame received in between, for longer than `_STUCK_S`, is abandoned too.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from dflow.distributed.transport.addresses import Address
from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.bind_and_dial import dial
from dflow.distributed.transport.connection import Connection
from dflow.distributed.transport.handshake import check_version, hear_hello, say_hello
from dflow.distributed.transport.link import LOGGER, Limits
from dflow.distributed.transport.process_identity import process_identity
from dflow.distributed.transport.reactor import Reactor
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.shared_memory import SharedMemory, agree_on_memory, may_share
from dflow.distributed.transport.stream import Deadline, Stream
from dflow.distributed.wire.messages.basic import Hello
from dflow.tracing.errors import DflowError, SecurityError, WireError

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 0.5
#: Time after which a connection that is still broken is logged.
_LOGGED_AFTER_S = 3.0
#: Time limit of one attempt, since a host may not answer at all.
_DIAL_S = 3.0
_MOST_IN_A_ROW = 20
_STUCK_S = 5.0


class Dialler:
    """Dials the listener at `address` as `name`: once to begin a session, then whenever its stream broke."""

    def __init__(self, address: Address, name: str, limits: Limits, security: SecurityPolicy, reactor: Reactor) -> None:
        self._address = address
        self._limits = limits
        self._security = security
        self._reactor = reactor
        shares = may_share(address, limits)
        self._hello = Hello(name, session=secrets.token_hex(16), process=process_identity(), shares=shares)
        #: Number of frames received by both sides at the last recovery, and number of recoveries since it changed.
        self._received = (0, 0)
        self._in_a_row = 0

    def connect(self, handler: Handler, timeout_s: float) -> Peer:
        """Begin the session; raises OSError or a DflowError."""
        stream, answer, self._identity, memory = self._greet(self._hello, timeout_s)
        self._first_answer = answer
        connection = Connection(stream, answer.name, self._limits, self._reactor, self._recover)
        peer = Peer(connection, local=self._hello.name, remote=answer.name, handler=handler, limits=self._limits)
        connection.start(peer.arrived, peer.close, memory)
        return peer

    def _recover(self, connection: Connection, broken: Stream, reason: str) -> str:
        """Dial until the connection is resumed; see `connection.Recover`."""
        deadline = Deadline.after(self._limits.resume_s)
        if self._in_a_row == 0:
            self._stuck_by = Deadline.after(min(self._limits.resume_s, _STUCK_S))
        if self._in_a_row >= _MOST_IN_A_ROW and self._stuck_by.has_passed:
            return f"{reason}; the connection broke {self._in_a_row} times in a row"
        retry_s, began_s, is_logged, name = FIRST_RETRY_S, time.monotonic(), False, self._first_answer.name
        while not connection.is_closed:
            try:
                stream, answer = self._dial_again(connection.session.received, deadline.left_s)
            except (ConnectionRefusedError, FileNotFoundError):
                return f"{reason}, and nothing listens there any more"
            except (SecurityError, WireError) as error:
                return f"{reason}, and {error}"
            except (OSError, DflowError) as error:
                if deadline.left_s <= retry_s:
                    return f"{reason}, and it could not be reached again within {deadline.timeout_s:g} s: {error}"
                broken_s = time.monotonic() - began_s
                if broken_s >= _LOGGED_AFTER_S and not is_logged:
                    more = f"it is tried for another {deadline.left_s:.0f} s, and steps wait"
                    LOGGER.warning("no connection to %s for %.1f s: %s; %s", name, broken_s, error, more)
                    is_logged = True
                connection.is_over(broken, retry_s)
                retry_s = min(2 * retry_s, LONGEST_RETRY_S)
            else:
                received = (connection.session.received, answer.received)
                self._in_a_row = self._in_a_row + 1 if received == self._received else 0
                self._received = received
                if is_logged:
                    LOGGER.warning("the connection to %s is back after %.1f s", name, time.monotonic() - began_s)
                return connection.resume(stream, answer.received)
        return "closed by this side"

    def _greet(self, hello: Hello, timeout_s: float) -> tuple[Stream, Hello, str, SharedMemory]:
        """Dial; return the stream, the listener's `Hello`, the identity that it proved, and shared memory."""
        deadline = Deadline.after(min(timeout_s, self._limits.hello_timeout_s))
        sock = dial(self._address, min(timeout_s, _DIAL_S))
        try:
            stream, identity = secured = self._security.secure(sock, self._address, deadline, is_server=False)
            say_hello(stream, hello, deadline)
            answer = hear_hello(secured, self._security, self._limits, deadline)
            check_version(answer)
            shares = hello.shares and answer.shares
            memory = agree_on_memory(sock, self._limits.shared_bytes) if shares else (None, None)
            stream.set_timeout(self._limits.stall_timeout_s)
        except BaseException:
            sock.close()
            raise
        return stream, answer, identity, memory

    def _dial_again(self, received: int, timeout_s: float) -> tuple[Stream, Hello]:
        ours, first = self._hello, self._first_answer
        hello = msgspec.structs.replace(ours, received=received, resumes=True, shares=False)
        stream, answer, identity, _ = self._greet(hello, timeout_s)
        known = ours.session, first.name, first.process, self._identity
        if (answer.session, answer.name, answer.process, identity) != known:
            stream.close()
            raise WireError(f"{answer.name} knows nothing of this connection any more")
        return stream, answer
