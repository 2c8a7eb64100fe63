"""Connections between processes over sockets.

Why: this is how the tasks of a cluster reach each other. One thread reads each connection; see `families` for the
kinds of sockets, `framing` for the bytes, `outlet` for sending and `security` for who is let in.

Invariants: the policy secures a connection before anything is read from it as a frame, and nothing but a `Hello` of
this protocol version is taken from it before it is a peer; both together within `Limits.hello_timeout_s`. A frame
that is malformed, oversized or late ends its own connection with a logged reason and nothing else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from dflow.distributed.codec import decode_message, encode_message
from dflow.distributed.messages import PROTOCOL_VERSION, Hello
from dflow.distributed.transport.addresses import Address, parse_address
from dflow.distributed.transport.admission import Admission
from dflow.distributed.transport.base import Handler, Limits
from dflow.distributed.transport.exchange import LOGGER, Exchange, Frame, Kind, become_reader
from dflow.distributed.transport.families import Bound, bind, dial, send_at_once
from dflow.distributed.transport.framing import Deadline, FrameReader, read_first
from dflow.distributed.transport.outlet import Outlet
from dflow.distributed.transport.security import SameMachine, Secured, SecurityPolicy
from dflow.distributed.transport.stream import Stream
from dflow.distributed.transport.throttle import Throttle, on_one_line
from dflow.tracing.errors import DeadlineExceeded, DflowError, SecurityError, TransportClosed, WireError

_FIRST_RETRY_S = 0.02
_LONGEST_RETRY_S = 0.5
_LONGEST_NAME = 256


class SocketTransport:
    """Sockets, to whom `security` lets through; see `addresses` for how addresses are written."""

    def __init__(self, limits: Limits | None = None, security: SecurityPolicy | None = None) -> None:
        self._limits = limits or Limits()
        self._security = security or SameMachine()

    def listen(self, address: str, *, name: str, handler: Handler) -> SocketListener:
        """Take connections at `address`; see `base.Transport.listen`."""
        place = parse_address(address)
        self._security.may_listen(place)
        return SocketListener(bind(place), name, handler, self._limits, self._security)

    def connect(self, address: str, *, name: str, handler: Handler, who: str, timeout_s: float) -> Exchange:
        """Connect to `address`, retrying while nothing answers there; see `base.Transport.connect`."""
        place = parse_address(address)
        self._security.may_connect(place)
        deadline = time.monotonic() + timeout_s
        retry_s = _FIRST_RETRY_S
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                return self._connect_once(place, name, handler, left_s)
            except (WireError, SecurityError) as error:
                raise type(error)(f"{who} at {address} cannot be spoken to: {error}") from error
            except (OSError, TransportClosed, DeadlineExceeded) as error:
                if time.monotonic() + retry_s >= deadline:
                    raise DeadlineExceeded(
                        f"{who} at {address} could not be reached within {timeout_s:g} s: {_reason(error)}; "
                        "check that it runs and that the address is right"
                    ) from error
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)

    def _connect_once(self, place: Address, name: str, handler: Handler, timeout_s: float) -> Exchange:
        deadline = Deadline.after(min(timeout_s, self._limits.hello_timeout_s))
        sock = dial(place, timeout_s)
        try:
            send_at_once(sock)
            secured = self._security.secure_client(sock, place, deadline.left_s)
            peer = _shake_hands(secured, self._security, name, handler, self._limits, deadline)
        except BaseException:
            sock.close()
            raise

        def read() -> None:
            with contextlib.closing(secured.stream):
                _read_all(secured.stream, peer, self._limits)

        threading.Thread(target=read, name=f"dflow read {peer.name}", daemon=True).start()
        return peer


class SocketListener:
    """A listening socket and the connections it accepted; see `base.Listener`."""

    def __init__(self, bound: Bound, name: str, handler: Handler, limits: Limits, security: SecurityPolicy) -> None:
        self._bound = bound
        self._name = name
        self._handler = handler
        self._limits = limits
        self._security = security
        self._lock = threading.Lock()
        self._is_closed = False
        self._admission = Admission(
            connections=limits.max_connections, strangers=limits.max_strangers, per_source=limits.max_from_source
        )
        self._last_number = 0
        self._strangers: dict[int, socket.socket] = {}
        self._throttle = Throttle()
        self._peers: set[Exchange] = set()
        threading.Thread(target=self._accept_all, name=f"dflow accept {name}", daemon=True).start()

    @property
    def address(self) -> str:
        """The address to connect to, with the real port or path."""
        return str(self._bound.address)

    def close(self) -> None:
        """Stop listening and end every connection made here."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            strangers, peers = list(self._strangers.values()), list(self._peers)
        _shut_down(self._bound.sock)
        self._bound.sock.close()
        self._bound.clean_up()
        for sock in strangers:
            _shut_down(sock)
        for peer in peers:
            peer.close(f"{self._name} stopped listening")

    def _accept_all(self) -> None:
        while True:
            try:
                sock, source = self._bound.sock.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._warn("a connection could not be accepted: %s", error)
                time.sleep(_FIRST_RETRY_S)
                continue
            host = source[0] if source else ""
            where = str(source or self._bound.address)
            number = self._admit(sock, host, where)
            if number is not None:
                self._start(sock, number, where)

    def _start(self, sock: socket.socket, number: int, source: str) -> None:
        reader = threading.Thread(target=self._serve, args=(sock, number, source), daemon=True)
        reader.name = f"dflow read {self._name}"
        try:
            reader.start()
        except RuntimeError as error:  # no more threads for now
            self._warn("connection from %s refused: %s", source, error)
            self._forget(number)
            sock.close()

    def _admit(self, sock: socket.socket, host: str, source: str) -> int | None:
        """The number of a connection that may wait until it is believed, for which others may have to go."""
        with self._lock:
            self._last_number += 1
            number = self._last_number
            decision = self._admission.arrive(number, host)
            evicted = [self._strangers.pop(one) for one in decision.evicted]
            is_admitted = decision.admitted and not self._is_closed
            if is_admitted:
                self._strangers[number] = sock
        for stranger in evicted:
            self._warn("a connection was given up for one from %s: %s", source, decision.why)
            _shut_down(stranger)
        if is_admitted:
            return number
        self._warn("connection from %s refused: %s", source, decision.why or "it stopped listening")
        sock.close()
        return None

    def _warn(self, text: str, *values: object) -> None:
        """Log what strangers bring about, which is as often as they like."""
        more = self._throttle.ask()
        if more is not None:
            LOGGER.warning("%s: %s%s", self._name, on_one_line(text % values), more)

    def _serve(self, sock: socket.socket, number: int, source: str) -> None:
        peer = None
        deadline = Deadline.after(self._limits.hello_timeout_s)
        stream: Stream | None = None
        try:
            send_at_once(sock)
            secured = self._security.secure_server(sock, self._bound.address, deadline.left_s)
            stream = secured.stream
            peer = _shake_hands(secured, self._security, self._name, self._handler, self._limits, deadline)
            if self._promote(number, peer):
                _read_all(stream, peer, self._limits)
        except (DflowError, OSError) as error:
            self._warn("connection from %s closed: %s", source, _reason(error))
        finally:
            self._forget(number, peer)
            if stream is not None:
                stream.close()
            sock.close()

    def _promote(self, number: int, peer: Exchange) -> bool:
        """Count a stranger as a peer, unless it was given up or the listener has closed meanwhile."""
        with self._lock:
            is_peer = self._admission.believe(number) and not self._is_closed
            self._strangers.pop(number, None)
            if is_peer:
                self._peers.add(peer)
            return is_peer

    def _forget(self, number: int, peer: Exchange | None = None) -> None:
        with self._lock:
            self._admission.leave(number)
            self._strangers.pop(number, None)
            if peer is not None:
                self._peers.discard(peer)


class _StreamLink:
    """A stream as a `Link`; it knows the exchange it serves once that is made."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._stream = stream
        self._outlet = Outlet(stream, limits, self._fail)
        self.exchange: Exchange | None = None

    def send(self, frame: Frame) -> None:
        self._outlet.send(frame)

    def close(self) -> None:
        self._stream.shut_down()

    def _fail(self, reason: str) -> None:
        if self.exchange is not None:
            self.exchange.close(reason)


def _shake_hands(
    secured: Secured, security: SecurityPolicy, name: str, handler: Handler, limits: Limits, deadline: Deadline
) -> Exchange:
    """Tell the other side who this is and learn who it is; returns with the stream ready for frames."""
    stream = secured.stream
    link = _StreamLink(stream, limits)
    stream.set_timeout(deadline.left_s)
    link.send(Frame(Kind.NOTIFY, 0, encode_message(Hello(name)), b""))
    hello = decode_message(read_first(stream, limits, deadline).meta)
    if not isinstance(hello, Hello):
        raise WireError(f"the first message is a {type(hello).__name__}; a connection starts with a Hello")
    if not (0 < len(hello.name) <= _LONGEST_NAME and hello.name.isprintable()):
        raise WireError(
            f"a name of {len(hello.name)} characters, not all of which can be printed; 1 to {_LONGEST_NAME} may"
        )
    if hello.version != PROTOCOL_VERSION:
        raise WireError(
            f"{hello.name} speaks protocol version {hello.version} and this side version {PROTOCOL_VERSION}; "
            "install the same dflow on both"
        )
    security.may_be_called(secured.identity, hello.name)
    stream.set_timeout(limits.stall_timeout_s)
    link.exchange = Exchange(link, local=name, remote=hello.name, handler=handler, limits=limits)
    return link.exchange


def _read_all(stream: Stream, peer: Exchange, limits: Limits) -> None:
    """Hand every frame of the connection to its exchange, and close that when the frames end."""
    become_reader()
    reader = FrameReader(stream, limits)
    reason = "the other side closed the connection"
    try:
        while (frame := reader.read()) is not None:
            peer.arrived(frame)
    except (TransportClosed, OSError, MemoryError) as error:
        reason = _reason(error)
    except WireError as error:
        reason = f"the other side broke the protocol: {error}"
        LOGGER.warning("connection to %s closed: %s", peer.name, reason)
    finally:
        peer.close(reason)


def _reason(error: BaseException) -> str:
    system = error.strerror if isinstance(error, OSError) else None
    return system or str(error) or type(error).__name__


def _shut_down(sock: socket.socket) -> None:
    """Wake whoever waits on `sock`; the thread that reads it closes it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
