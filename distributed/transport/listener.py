"""A listening socket, its unauthenticated connections (strangers), and the sessions that began over it.

Invariants: the security policy secures a connection before any frame is read from it, and only a `Hello` of this
protocol version is accepted before the connection becomes a peer. Both take at most `Limits.hello_timeout_s` together.
A session is resumed only by a peer with its original identity, name and process. A broken session ends when another
process connects by its name and identity, since the original process has then ended.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from dflow.distributed.transport.addresses import Address, Endpoints, UnixAddress
from dflow.distributed.transport.base import Handler, Limits
from dflow.distributed.transport.connection import Connection
from dflow.distributed.transport.deadline import Deadline
from dflow.distributed.transport.descriptors import raise_descriptor_limit
from dflow.distributed.transport.exchange import LOGGER, Exchange
from dflow.distributed.transport.families import Bound, send_at_once
from dflow.distributed.transport.handshake import check_version, hear_hello, say_hello
from dflow.distributed.transport.process_identity import host_identity, process_identity
from dflow.distributed.transport.reactor import Reactor
from dflow.distributed.transport.renewal import AwaitRedial
from dflow.distributed.transport.security.admission import Admission, Belief
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.throttle import Throttle, on_one_line
from dflow.distributed.transport.shared_memory import SharedMemory, may_share
from dflow.distributed.transport.stream import Stream
from dflow.distributed.wire.failures import failure_of
from dflow.distributed.wire.messages import Hello
from dflow.tracing.errors import DflowError, SecurityError, TransportClosed, WireError

_AFTER_FAULT_S = 0.02


@dataclass(eq=False)
class _Session:
    """A peer of this listener. `renewal` is None if the peer requested no session."""

    hello: Hello
    identity: str
    exchange: Exchange
    connection: Connection
    renewal: AwaitRedial | None


#: File descriptors that a process needs besides the connections of a listener.
_OTHER_FILES = 64


@dataclass(frozen=True)
class _Room:
    """The number of peers that a listener accepts: `wanted`, or fewer if the process may open only `files` files."""

    connections: int
    wanted: int
    files: int

    @classmethod
    def of(cls, limits: Limits) -> _Room:
        """Return the largest number of peers that `limits` and the system allow."""
        files = raise_descriptor_limit()
        spare = max(files - limits.max_strangers - _OTHER_FILES, files // 2)
        return cls(min(limits.max_connections, spare), limits.max_connections, files)

    def full(self) -> str:
        """Return why no more peers are accepted, and the remedy."""
        if self.connections < self.wanted:
            cause = f"since its process may open only {self.files} files; raise that limit (ulimit -n) where it starts"
        else:
            cause = "which is its limit; start fewer tasks"
        return f"has {self.connections} connections and takes no more, {cause}"


@dataclass(frozen=True)
class _Arrival:
    """A connection that was accepted `at` one of the listener's addresses, with its number in `Admission`."""

    sock: socket.socket
    at: Address
    source: str
    number: int


class SocketListener:
    """Accepts connections at one address or two (TCP and Unix); see `base.Listener`. `own` is this side's name."""

    def __init__(
        self,
        bounds: Sequence[Bound],
        own: str,
        handler: Handler,
        limits: Limits,
        security: SecurityPolicy,
        reactor: Reactor,
    ) -> None:
        self._reactor = reactor
        self._bounds = bounds
        self._name = own
        self._handler = handler
        self._limits = limits
        self._security = security
        self._lock = threading.Lock()
        self._is_closed = False
        #: Sessions answered but not yet in `_sessions`. Their peer may already reconnect, and `_find` waits for them.
        self._beginning: set[str] = set()
        self._has_begun = threading.Condition(self._lock)
        self._room = _Room.of(limits)
        self._admission = Admission(
            connections=self._room.connections, strangers=limits.max_strangers, per_source=limits.max_from_source
        )
        self._last_number = 0
        self._strangers: dict[int, socket.socket] = {}
        self._throttle = Throttle()
        self._sessions: set[_Session] = set()
        for bound in bounds:
            threading.Thread(target=self._accept_all, args=(bound,), name=f"dflow accept {own}", daemon=True).start()

    @property
    def address(self) -> str:
        """The address to connect to, with the real port or path."""
        main, *near = (bound.address for bound in self._bounds)
        if near and isinstance(near[0], UnixAddress):
            return str(Endpoints(main, near[0], host_identity()))
        return str(main)

    def close(self) -> None:
        """Stop listening and end every connection made here."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            strangers, sessions = list(self._strangers.values()), list(self._sessions)
        for bound in self._bounds:
            _shut_down(bound.sock)
            bound.sock.close()
            bound.clean_up()
        for sock in strangers:
            _shut_down(sock)
        for session in sessions:
            session.exchange.close(f"{self._name} stopped listening")

    def _accept_all(self, bound: Bound) -> None:
        while True:
            try:
                sock, source = bound.sock.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._warn("a connection could not be accepted: %s", error)
                time.sleep(_AFTER_FAULT_S)
                continue
            host = source[0] if source else ""
            where = str(source or bound.address)
            number = self._admit(sock, host, where)
            if number is not None:
                self._start(_Arrival(sock, bound.address, where, number))

    def _start(self, arrival: _Arrival) -> None:
        reader = threading.Thread(target=self._serve, args=(arrival,), daemon=True)
        reader.name = f"dflow greet {self._name}"
        try:
            reader.start()
        except RuntimeError as error:  # no more threads for now
            self._warn("connection from %s refused: %s", arrival.source, error)
            self._forget(arrival.number)
            arrival.sock.close()

    def _admit(self, sock: socket.socket, host: str, source: str) -> int | None:
        """Admit a connection as a stranger, evicting others if necessary; return its number, or None if refused."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            decision = self._admission.arrive(number, host)
            evicted = [self._strangers.pop(one) for one in decision.evicted]
            if is_admitted := not self._is_closed:
                self._strangers[number] = sock
        for stranger in evicted:
            self._warn("a connection was given up for one from %s: %s", source, decision.why)
            _shut_down(stranger)
        if is_admitted:
            return number
        self._warn("connection from %s refused: it stopped listening", source)
        sock.close()
        return None

    def _warn(self, text: str, *values: object) -> None:
        """Log an event that strangers cause, throttled, since they can cause any number of them."""
        more = self._throttle.ask()
        if more is not None:
            LOGGER.warning("%s: %s%s", self._name, on_one_line(text % values), more)

    def _serve(self, arrival: _Arrival) -> None:
        stream: Stream | None = None
        session: _Session | None = None
        is_read = False
        try:
            deadline = Deadline.after(self._limits.hello_timeout_s)
            secured = self._secure(arrival, deadline)
            stream = secured.stream
            hello = self._hear(secured, deadline)
            if hello.resumes:
                is_taken = self._resume(secured, hello, deadline)
                stream = None if is_taken else stream
                return
            self._believe(arrival.number, secured, deadline)
            try:
                session = self._begin(arrival, secured, hello, deadline)
                is_peer = self._promote(arrival.number, session)
            finally:
                self._has_been_begun(hello.session)
            if is_peer:
                session.connection.start(session.exchange, partial(self._forget, arrival.number, session))
                is_read = True
        except (DflowError, OSError, RuntimeError) as error:
            self._warn("connection from %s closed: %s", arrival.source, _reason(error))
        finally:
            if not is_read:
                self._forget(arrival.number, session)
                if stream is not None:
                    stream.close()

    def _secure(self, arrival: _Arrival, deadline: Deadline) -> Secured:
        try:
            send_at_once(arrival.sock)
            return self._security.secure(arrival.sock, arrival.at, deadline, is_server=True)
        except BaseException:
            arrival.sock.close()
            raise

    def _hear(self, secured: Secured, deadline: Deadline) -> Hello:
        """Receive the stranger's `Hello`. If the policy refuses its name, answer with the reason, so it won't retry."""
        try:
            return hear_hello(secured, self._security, self._limits, deadline)
        except SecurityError as error:
            say_hello(secured.stream, failure_of(error), deadline)
            raise

    def _believe(self, number: int, secured: Secured, deadline: Deadline) -> None:
        """Count a stranger as a peer; raises TransportClosed if it was evicted, or there is no room for more peers."""
        with self._lock:
            belief = self._admission.believe(number)
        if belief is Belief.EVICTED:
            raise TransportClosed("it was evicted for another connection")
        if belief is Belief.NO_ROOM:
            error = TransportClosed(f"{self._name} {self._room.full()}")
            say_hello(secured.stream, failure_of(error), deadline)
            raise error

    def _begin(self, arrival: _Arrival, secured: Secured, hello: Hello, deadline: Deadline) -> _Session:
        """Answer a stranger's first `Hello` and build its connection, which is not started yet."""
        shares = hello.shares and may_share(arrival.at, secured.stream, self._limits)
        answer = Hello(self._name, session=hello.session, process=process_identity(), shares=shares)
        with self._lock:
            self._beginning.add(hello.session)
        say_hello(secured.stream, answer, deadline)
        check_version(hello)
        memory = SharedMemory.agree(arrival.sock, self._limits.shared_bytes) if shares else None
        secured.stream.set_timeout(self._limits.stall_timeout_s)
        renewal = AwaitRedial(hello.process, answer, self._limits) if hello.session else None
        connection = Connection(secured.stream, self._limits, renewal, self._reactor, memory)
        exchange = Exchange(connection, local=self._name, remote=hello.name, handler=self._handler, limits=self._limits)
        return _Session(hello, secured.identity, exchange, connection, renewal)

    def _promote(self, number: int, session: _Session) -> bool:
        """Record the session of a new peer, and end the sessions that it replaces; False if the listener has closed."""
        with self._lock:
            is_peer = not self._is_closed
            self._strangers.pop(number, None)
            others = list(self._sessions)
            if is_peer:
                self._sessions.add(session)
        if not is_peer:
            session.exchange.close(f"{self._name} stopped listening")
        for other in others:
            if _has_replaced(session, other):
                other.exchange.close(f"another process has come as {session.hello.name}")
        return is_peer

    def _has_been_begun(self, session: str) -> None:
        with self._lock:
            self._beginning.discard(session)
            self._has_begun.notify_all()

    def _forget(self, number: int, session: _Session | None = None) -> None:
        with self._lock:
            self._admission.leave(number)
            self._strangers.pop(number, None)
            if session is not None:
                self._sessions.discard(session)

    def _resume(self, secured: Secured, hello: Hello, deadline: Deadline) -> bool:
        """Hand a stream to the session that it resumes; if there is none, answer so and return False."""
        check_version(hello)
        session = self._find(hello, secured.identity, deadline)
        if session is not None and session.renewal is not None:
            before = session.connection.stream
            if session.renewal.offer(secured.stream, hello.received):
                before.shut_down()
                return True
        say_hello(secured.stream, Hello(self._name), deadline)
        LOGGER.info("%s: %s wants to go on with a session that has ended here", self._name, hello.name)
        return False

    def _find(self, hello: Hello, identity: str, deadline: Deadline) -> _Session | None:
        if not hello.session:
            return None
        with self._lock:
            self._has_begun.wait_for(lambda: hello.session not in self._beginning, deadline.left_s)
            for session in self._sessions:
                if session.hello.session == hello.session:
                    break
            else:
                return None
        if session.identity != identity or session.hello.name != hello.name:
            raise SecurityError(f"{hello.name} is not {session.hello.name}, whose session it wants to go on with")
        if session.hello.process != hello.process:
            raise WireError(f"{hello.name} has started anew, but wants to go on with the session it had before")
        return session


def _has_replaced(new: _Session, old: _Session) -> bool:
    """Whether the process that `old` waits for was replaced: another process has its name and identity."""
    same_name = old.hello.name == new.hello.name and old.identity == new.identity
    return same_name and old.hello.process != new.hello.process and old.connection.is_broken


def _reason(error: BaseException) -> str:
    system = error.strerror if isinstance(error, OSError) else None
    return system or str(error) or type(error).__name__


def _shut_down(sock: socket.socket) -> None:
    """Wake the thread that waits on `sock`; the thread that serves `sock` closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
