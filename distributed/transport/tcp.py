"""Connections between processes over TCP.

Why: this is how the tasks of a cluster reach each other. One thread reads each connection; see `framing` for the
bytes and `outlet` for sending.

Invariants: nothing but a `Hello` of this protocol version is taken from a connection before it is a peer. A frame
that is malformed, oversized or late ends its own connection with a logged reason and nothing else. Only loopback
addresses are used, since nothing here encrypts.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from typing import NamedTuple

from dflow.distributed.codec import decode_message, encode_message
from dflow.distributed.messages import PROTOCOL_VERSION, Hello
from dflow.distributed.transport.base import Handler, Limits
from dflow.distributed.transport.exchange import LOGGER, Exchange, Frame, Kind, become_reader
from dflow.distributed.transport.framing import FrameReader, read_first, set_stall_timeout
from dflow.distributed.transport.outlet import Outlet
from dflow.tracing.errors import DeadlineExceeded, DflowError, SecurityError, TransportClosed, WireError

_FIRST_RETRY_S = 0.02
_LONGEST_RETRY_S = 0.5


class TcpTransport:
    """TCP on this machine's loopback addresses, written "127.0.0.1:4321"; port 0 listens on a free one."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()

    def listen(self, address: str, *, name: str, handler: Handler) -> TcpListener:
        """Take connections at `address`; see `base.Transport.listen`."""
        place = _parse_loopback(address)
        sock = socket.create_server((place.host, place.port), family=place.family, backlog=128)
        return TcpListener(sock, name, handler, self._limits)

    def connect(self, address: str, *, name: str, handler: Handler, who: str, timeout_s: float) -> Exchange:
        """Connect to `address`, retrying while nothing answers there; see `base.Transport.connect`."""
        place = _parse_loopback(address)
        deadline = time.monotonic() + timeout_s
        retry_s = _FIRST_RETRY_S
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                return _connect_once(place, name, handler, self._limits, left_s)
            except WireError as error:
                raise WireError(f"{who} at {address} cannot be spoken to: {error}") from error
            except (OSError, TransportClosed, DeadlineExceeded) as error:
                if time.monotonic() + retry_s >= deadline:
                    raise DeadlineExceeded(
                        f"{who} at {address} could not be reached within {timeout_s:g} s: {_reason(error)}; "
                        "check that it runs and that the address is right"
                    ) from error
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, _LONGEST_RETRY_S)


class TcpListener:
    """A listening socket and the connections it accepted; see `base.Listener`."""

    def __init__(self, sock: socket.socket, name: str, handler: Handler, limits: Limits) -> None:
        self._sock = sock
        self._name = name
        self._handler = handler
        self._limits = limits
        host, port = sock.getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._lock = threading.Lock()
        self._is_closed = False
        self._strangers: set[socket.socket] = set()
        self._peers: set[Exchange] = set()
        threading.Thread(target=self._accept_all, name=f"dflow accept {name}", daemon=True).start()

    @property
    def address(self) -> str:
        """The address to connect to, with the real port."""
        return self._address

    def close(self) -> None:
        """Stop listening and end every connection made here."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            strangers, peers = list(self._strangers), list(self._peers)
        _shut_down(self._sock)
        self._sock.close()
        for sock in strangers:
            _shut_down(sock)
        for peer in peers:
            peer.close(f"{self._name} stopped listening")

    def _accept_all(self) -> None:
        while True:
            try:
                sock, source = self._sock.accept()
            except OSError as error:
                if self._is_closed:
                    return
                LOGGER.warning("%s: a connection could not be accepted: %s", self._name, error)
                time.sleep(_FIRST_RETRY_S)
                continue
            if self._admit(sock, str(source)):
                reader = threading.Thread(target=self._serve, args=(sock, str(source)), daemon=True)
                reader.name = f"dflow read {self._name}"
                reader.start()

    def _admit(self, sock: socket.socket, source: str) -> bool:
        with self._lock:
            count = len(self._strangers) + len(self._peers)
            if not self._is_closed and count < self._limits.max_connections:
                self._strangers.add(sock)
                return True
        LOGGER.warning(
            "%s: connection from %s refused: %d of %d connections are in use",
            *(self._name, source, count, self._limits.max_connections),
        )
        sock.close()
        return False

    def _serve(self, sock: socket.socket, source: str) -> None:
        peer = None
        try:
            peer = _shake_hands(sock, self._name, self._handler, self._limits, self._limits.hello_timeout_s)
            if self._promote(sock, peer):
                _read_all(sock, peer, self._limits)
        except (DflowError, OSError) as error:
            LOGGER.warning("%s: connection from %s closed: %s", self._name, source, _reason(error))
        finally:
            with self._lock:
                self._strangers.discard(sock)
                if peer is not None:
                    self._peers.discard(peer)
            sock.close()

    def _promote(self, sock: socket.socket, peer: Exchange) -> bool:
        """Count a stranger as a peer, unless the listener has closed meanwhile."""
        with self._lock:
            self._strangers.discard(sock)
            if not self._is_closed:
                self._peers.add(peer)
            return not self._is_closed


class _TcpLink:
    """A socket as a `Link`; it knows the exchange it serves once that is made."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._outlet = Outlet(sock, limits, self._fail)
        self.exchange: Exchange | None = None

    def send(self, frame: Frame) -> None:
        self._outlet.send(frame)

    def close(self) -> None:
        _shut_down(self._sock)

    def _fail(self, reason: str) -> None:
        if self.exchange is not None:
            self.exchange.close(reason)


class _Place(NamedTuple):
    host: str
    port: int
    family: socket.AddressFamily


def _parse_loopback(address: str) -> _Place:
    host, colon, port = address.rpartition(":")
    host = {"localhost": "127.0.0.1"}.get(host, host.removeprefix("[").removesuffix("]"))
    if not colon or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ValueError(f"address {address!r} is not of the form 'host:port', such as '127.0.0.1:4321'")
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        parsed = None
    if parsed is None or not parsed.is_loopback:
        raise SecurityError(
            f"address {address!r} is not a loopback address, and encryption is not built yet; "
            "use 127.0.0.1, ::1 or localhost"
        )
    return _Place(host, int(port), socket.AF_INET if parsed.version == 4 else socket.AF_INET6)


def _connect_once(place: _Place, name: str, handler: Handler, limits: Limits, timeout_s: float) -> Exchange:
    sock = socket.create_connection((place.host, place.port), timeout=timeout_s)
    try:
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError("nothing listens there (the port was free, and connected to itself)")
        peer = _shake_hands(sock, name, handler, limits, min(timeout_s, limits.hello_timeout_s))
    except BaseException:
        sock.close()
        raise

    def read() -> None:
        with contextlib.closing(sock):
            _read_all(sock, peer, limits)

    threading.Thread(target=read, name=f"dflow read {peer.name}", daemon=True).start()
    return peer


def _shake_hands(sock: socket.socket, name: str, handler: Handler, limits: Limits, timeout_s: float) -> Exchange:
    """Tell the other side who this is and learn who it is; returns with the socket ready for frames."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = _TcpLink(sock, limits)
    link.send(Frame(Kind.NOTIFY, 0, encode_message(Hello(name)), b""))
    hello = decode_message(read_first(sock, limits, timeout_s).meta)
    if not isinstance(hello, Hello):
        raise WireError(f"the first message is a {type(hello).__name__}; a connection starts with a Hello")
    if hello.version != PROTOCOL_VERSION:
        raise WireError(
            f"{hello.name} speaks protocol version {hello.version} and this side version {PROTOCOL_VERSION}; "
            "install the same dflow on both"
        )
    set_stall_timeout(sock, limits.stall_timeout_s)
    link.exchange = Exchange(link, local=name, remote=hello.name, handler=handler, limits=limits)
    return link.exchange


def _read_all(sock: socket.socket, peer: Exchange, limits: Limits) -> None:
    """Hand every frame of the connection to its exchange, and close that when the frames end."""
    become_reader()
    reader = FrameReader(sock, limits)
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
