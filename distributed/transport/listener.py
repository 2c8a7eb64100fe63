"""A listening socket, its unauthenticated connections, and the sessions that began over it.

Invariants: the security policy secures a connection before any frame is read from it, and only a `Hello` of this
protocol version is accepted before the connection becomes a peer. Both take at most `Limits.hello_timeout_s` together.
A session is resumed only by a peer with its original identity, name and process. A broken session ends when another
process connects by its name and identity, since the original process has then ended.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from dflow.distributed.process.open_files import OTHER_FILES, raise_open_files
from dflow.distributed.transport.addresses import Address, Endpoints, UnixAddress
from dflow.distributed.transport.base import Handler, Peer
from dflow.distributed.transport.bind_and_dial import BoundSocket
from dflow.distributed.transport.connection import Connection
from dflow.distributed.transport.handshake import check_version, hear_hello, say_hello
from dflow.distributed.transport.link import LOGGER, Limits
from dflow.distributed.transport.process_identity import has_ended, host_identity, process_identity
from dflow.distributed.transport.reactor import Reactor
from dflow.distributed.transport.security.admission import Admission
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.throttle import Throttle, on_one_line
from dflow.distributed.transport.shared_memory import SharedMemory, agree_on_memory, may_share
from dflow.distributed.transport.stream import Deadline, Stream, reason_of
from dflow.distributed.wire.failures import failure_of
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION, Hello
from dflow.tracing.errors import DeadlineExceeded, SecurityError, TransportClosed, WireError

_AFTER_FAULT_S = 0.02
#: Longest pause between two looks whether the process of a broken session has ended.
_LOOK_S = 0.05


@dataclass(eq=False)
class _Session:
    """A session that began here; `resuming` is held by the thread that gives it another stream."""

    hello: Hello
    identity: str
    peer: Peer
    connection: Connection
    resuming: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, eq=False)
class _Accepted:
    """A connection that was accepted `at` one of the listener's addresses, from an IP `host`."""

    sock: socket.socket
    at: Address
    host: str
    source: str


class SocketListener:
    """Accepts connections at one address or two (TCP and Unix); see `base.Listener`. `own` is this side's name."""

    def __init__(
        self,
        bounds: Sequence[BoundSocket],
        own: str,
        handler: Handler,
        limits: Limits,
        security: SecurityPolicy,
        reactor: Reactor,
    ) -> None:
        main, *near = (bound.address for bound in bounds)
        #: The address to connect to, with the real port or path.
        self.address = str(main)
        if near and isinstance(near[0], UnixAddress):
            self.address = str(Endpoints(main, near[0], host_identity()))
        self._reactor = reactor
        self._bounds = bounds
        self._name = own
        self._handler = handler
        self._limits = limits
        self._security = security
        self._lock = threading.Lock()
        self._is_closed = False
        room, self._is_full = _room(limits)
        self._admission: Admission[_Accepted] = Admission(
            connections=room, unauthenticated=limits.max_unauthenticated, per_source=limits.max_from_source
        )
        self._throttle = Throttle()
        self._sessions: set[_Session] = set()
        for bound in bounds:
            threading.Thread(target=self._accept_all, args=(bound,), name=f"dflow accept {own}", daemon=True).start()

    def close(self) -> None:
        """Stop listening and end every connection made here."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            arrivals, sessions = list(self._admission.unauthenticated), list(self._sessions)
        for bound in self._bounds:
            bound.close()
        for arrival in arrivals:
            Stream(arrival.sock).shut_down()
        for session in sessions:
            session.peer.close(f"{self._name} stopped listening")

    def _accept_all(self, bound: BoundSocket) -> None:
        while True:
            try:
                sock, source = bound.sock.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._warn("a connection could not be accepted: %s", error)
                time.sleep(_AFTER_FAULT_S)
                continue
            self._admit(_Accepted(sock, bound.address, source[0] if source else "", str(source or bound.address)))

    def _admit(self, arrival: _Accepted) -> None:
        """Serve a connection on a new thread; another unauthenticated one may be evicted for it."""
        with self._lock:
            evicted = self._admission.arrive(arrival, arrival.host)
        if evicted is not None:
            other, why = evicted
            self._warn("a connection was ended for one from %s: %s", arrival.source, why)
            Stream(other.sock).shut_down()
        try:
            threading.Thread(target=self._serve, args=(arrival,), name=f"dflow greet {self._name}", daemon=True).start()
        except RuntimeError as error:  # no more threads for now
            self._warn("connection from %s refused: %s", arrival.source, error)
            self._forget(arrival)
            arrival.sock.close()

    def _warn(self, text: str, *values: object) -> None:
        """Log an event that unauthenticated peers cause, throttled, since they can cause any number."""
        more = self._throttle.ask()
        if more is not None:
            LOGGER.warning("%s: %s%s", self._name, on_one_line(text % values), more)

    def _serve(self, arrival: _Accepted) -> None:
        session: _Session | None = None
        try:
            deadline = Deadline.after(self._limits.hello_timeout_s)
            secured = self._security.secure(arrival.sock, arrival.at, deadline, is_server=True)
            hello = self._hear(secured, deadline)
            if hello.resumes:
                self._resume(secured, hello, deadline)
            else:
                self._believe(arrival, secured, deadline)
                session = self._begin(secured, hello)
                memory = self._answer(arrival, secured, hello, deadline)
                on_end = partial(self._ended, arrival, session)
                session.connection.start(session.peer.arrived, on_end, memory)
                return
        except Exception as error:
            self._warn("connection from %s closed: %s", arrival.source, reason_of(error))
            if session is not None:
                session.connection.close()
            arrival.sock.close()
        self._forget(arrival, session)

    def _hear(self, secured: Secured, deadline: Deadline) -> Hello:
        """Receive the peer's `Hello`. If it is refused, answer first, so that the other side does not retry."""
        try:
            hello = hear_hello(secured, self._security, self._limits, deadline)
        except SecurityError as error:
            say_hello(secured.stream, failure_of(error), deadline)
            raise
        if hello.version != PROTOCOL_VERSION:
            say_hello(secured.stream, Hello(self._name), deadline)
        check_version(hello)
        if not hello.session:
            raise WireError(f"{hello.name} names no session")
        return hello

    def _believe(self, arrival: _Accepted, secured: Secured, deadline: Deadline) -> None:
        """Count the connection as a peer; raises TransportClosed if it was evicted, or there is no room."""
        with self._lock:
            has_room = self._admission.believe(arrival)
        if not has_room:
            error = TransportClosed(f"{self._name} {self._is_full}")
            say_hello(secured.stream, failure_of(error), deadline)
            raise error

    def _begin(self, secured: Secured, hello: Hello) -> _Session:
        """Record the session of a new peer, and end the sessions that it replaces.

        This comes before the answer: the peer may reconnect as soon as it has that.
        """
        connection = Connection(
            secured.stream, hello.name, self._limits, self._reactor, partial(self._await_redial, hello.process)
        )
        peer = Peer(connection, local=self._name, remote=hello.name, handler=self._handler, limits=self._limits)
        session = _Session(hello, secured.identity, peer, connection)
        with self._lock:
            if self._is_closed:
                raise TransportClosed(f"{self._name} stopped listening")
            others = list(self._sessions)
            self._sessions.add(session)
        for other in others:
            is_same_task = (other.hello.name, other.identity) == (hello.name, secured.identity)
            if is_same_task and other.hello.process != hello.process and other.connection.is_broken:
                other.peer.close(f"another process has come as {hello.name}")
        return session

    def _answer(self, arrival: _Accepted, secured: Secured, hello: Hello, deadline: Deadline) -> SharedMemory:
        """Answer the first `Hello` of a session, and agree on shared memory if both sides can."""
        shares = hello.shares and may_share(arrival.at, self._limits)
        answer = Hello(self._name, session=hello.session, process=process_identity(), shares=shares)
        say_hello(secured.stream, answer, deadline)
        memory = agree_on_memory(arrival.sock, self._limits.shared_bytes) if shares else (None, None)
        secured.stream.set_timeout(self._limits.stall_timeout_s)
        return memory

    def _ended(self, arrival: _Accepted, session: _Session, reason: str) -> None:
        session.peer.close(reason)
        self._forget(arrival, session)

    def _forget(self, arrival: _Accepted, session: _Session | None = None) -> None:
        with self._lock:
            self._admission.leave(arrival)
            if session is not None:
                self._sessions.discard(session)

    def _resume(self, secured: Secured, hello: Hello, deadline: Deadline) -> None:
        """Give a stream to the session that it resumes; if there is none, answer so and close the stream."""
        session = self._find(hello, secured.identity)
        if session is not None:
            if not session.resuming.acquire(timeout=deadline.left_s):
                raise DeadlineExceeded(f"another connection of {hello.name} is resuming the session")
            try:
                if session.connection.abandon_stream(deadline):
                    self._resume_over(secured.stream, session, hello, deadline)
                    return
            finally:
                session.resuming.release()
        say_hello(secured.stream, Hello(self._name), deadline)
        secured.stream.close()
        LOGGER.info("%s: %s wants to resume a session that has ended here", self._name, hello.name)

    def _resume_over(self, stream: Stream, session: _Session, hello: Hello, deadline: Deadline) -> None:
        connection, process = session.connection, process_identity()
        answer = Hello(self._name, session=hello.session, process=process, received=connection.session.received)
        say_hello(stream, answer, deadline)
        stream.set_timeout(self._limits.stall_timeout_s)
        try:
            reason = connection.resume(stream, hello.received)
        except RuntimeError as error:  # no more threads for now
            reason = str(error)
        if reason:
            session.peer.close(reason)

    def _find(self, hello: Hello, identity: str) -> _Session | None:
        with self._lock:
            session = next((one for one in self._sessions if one.hello.session == hello.session), None)
        if session is None:
            return None
        if session.identity != identity or session.hello.name != hello.name:
            raise SecurityError(f"{hello.name} is not {session.hello.name}, whose session it wants to resume")
        if session.hello.process != hello.process:
            raise WireError(f"{hello.name} has restarted, but wants to resume a session of its earlier process")
        return session

    def _await_redial(self, process: str, connection: Connection, broken: Stream, reason: str) -> str:
        """Wait until the process has reconnected or ended, for at most `resume_s`; see `connection.Recover`."""
        deadline = Deadline.after(self._limits.resume_s)
        pause_s = 0.001
        while not has_ended(process):
            if connection.is_over(broken, min(pause_s, deadline.left_s)):
                return "closed by this side" if connection.is_closed else ""
            if deadline.has_passed:
                return f"{reason}, and did not come back within {deadline.timeout_s:g} s"
            pause_s = min(2 * pause_s, _LOOK_S)
        return f"{reason}: its process has ended"


def _room(limits: Limits) -> tuple[int, str]:
    """Return the number of peers that `limits` and the system allow, and why there are no more."""
    files = raise_open_files()
    room = min(limits.max_connections, max(files - limits.max_unauthenticated - OTHER_FILES, files // 2))
    cause = "which is its limit; start fewer tasks"
    if room < limits.max_connections:
        cause = f"since its process may open only {files} files; raise that limit (ulimit -n) where it starts"
    return room, f"has {room} connections and takes no more, {cause}"
