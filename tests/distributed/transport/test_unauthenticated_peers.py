"""Listeners and unauthenticated peers: the waits of these, their limits and their cost, and that other peers get in."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflow.distributed.transport.framing import pack_header
from dflow.distributed.transport.link import Frame, Kind, Limits
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.distributed.transport.sockets import SocketListener, SocketTransport
from dflow.distributed.wire.codec import encode_message
from dflow.distributed.wire.messages.basic import Hello, Ok
from dflow.tracing.errors import DeadlineExceeded, SecurityError
from tests.distributed.transports import DEADLINE_S, Recorder, certificates, echo, own_address, reach

SECRET = "s" * 64


@pytest.fixture
def secret(tmp_path: Path) -> SharedSecret:
    return SharedSecret(secret_file(tmp_path))


def secret_file(folder: Path, text: str = SECRET) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(0o600)
    return path


Listen = Callable[..., SocketListener]


@pytest.fixture
def listen() -> Iterator[Listen]:
    made: list[SocketListener] = []

    def start(limits: Limits, security: SecurityPolicy | None = None, address: str = "127.0.0.1:0") -> SocketListener:
        transport = SocketTransport(limits, security)
        made.append(transport.listen(address, name="server", handler=Recorder(echo)))
        return made[-1]

    yield start
    for listener in made:
        listener.close()


def dial(listener: SocketListener) -> socket.socket:
    host, port = listener.address.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def is_closed_by_the_other_side(sock: socket.socket) -> bool:
    """Wait, up to the socket's time-out."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def serves(listener: SocketListener, security: SecurityPolicy | None = None) -> bool:
    peer = reach(SocketTransport(security=security), listener.address, Recorder())
    try:
        return peer.call(Ok(), b"abc", timeout_s=DEADLINE_S).payload == b"abc"
    finally:
        peer.close()


def greeters() -> list[threading.Thread]:
    """The threads that wait for the first message of an unauthenticated peer, oldest first."""
    return [thread for thread in threading.enumerate() if thread.name == "dflow greet server"]


def hello(name: str) -> bytes:
    meta = encode_message(Hello(name, session="s"))
    return pack_header(Frame(Kind.NOTIFY, 0, meta, b"")) + meta


@pytest.mark.parametrize("said", [0, 31, 40])
@pytest.mark.parametrize("policy", ["same machine", "certificates"])
def test_a_stranger_that_says_too_little_goes_when_its_time_is_up(listen: Listen, said: int, policy: str) -> None:
    security = certificates() if policy == "certificates" else None
    listener = listen(Limits(hello_timeout_s=0.1), security)
    with dial(listener) as sock:
        sock.sendall(hello("stranger")[:said])
        assert is_closed_by_the_other_side(sock)
    assert serves(listener, security)


@pytest.mark.parametrize("policy", ["same machine", "certificates", "secret"])
def test_a_crowd_of_silent_strangers_keeps_nobody_out(listen: Listen, policy: str, secret: SharedSecret) -> None:
    """Their time does not expire: a new connection gets in because the oldest one is closed."""
    security = {"same machine": None, "certificates": certificates(), "secret": secret}[policy]
    listener = listen(Limits(hello_timeout_s=1000.0, max_unauthenticated=8, max_from_source=8), security)
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(dial(listener)) for _ in range(20)]
        assert all(is_closed_by_the_other_side(sock) for sock in silent[:12])
        assert serves(listener, security)
        assert len(listener._admission.unauthenticated) <= 8


def test_a_crowd_costs_no_more_threads_than_may_wait(listen: Listen) -> None:
    listener = listen(Limits(hello_timeout_s=1000.0, max_unauthenticated=4, max_from_source=4))
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(dial(listener)) for _ in range(60)]
        assert all(is_closed_by_the_other_side(sock) for sock in silent[:56])
        assert greeters()
        assert serves(listener)
        assert len(listener._admission.unauthenticated) <= 4
    while left := greeters():  # the last may start when all before it have ended
        left[0].join(DEADLINE_S)
        assert not left[0].is_alive()


def test_a_knocking_stranger_does_not_fill_the_log(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    for _ in range(100):
        with dial(listener) as sock:
            sock.sendall(b"x" * 32)
            assert is_closed_by_the_other_side(sock)
    assert len(caplog.records) <= 20


def test_a_hello_takes_no_more_memory_than_a_hello_needs(listen: Listen) -> None:
    listener = listen(Limits(hello_timeout_s=1000.0))
    with dial(listener) as sock:
        sock.sendall(pack_header(Frame(Kind.NOTIFY, 0, bytes(5000), b"")))
        assert is_closed_by_the_other_side(sock)


def test_without_a_thread_for_it_a_connection_is_refused_and_the_next_is_served(
    listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = listen(Limits())
    start = threading.Thread.start
    fails = [True]

    def sometimes(self: threading.Thread) -> None:
        if fails and self.name == "dflow greet server":
            fails.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    with dial(listener) as sock:
        assert is_closed_by_the_other_side(sock)
    assert serves(listener)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nWARNING forged", "\x1b[2J"])
def test_a_name_that_cannot_stand_in_a_log_is_refused(
    listen: Listen, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    with dial(listener) as sock:
        sock.sendall(hello(name))
        assert is_closed_by_the_other_side(sock)
    assert f"a name of {len(name)} characters" in caplog.records[-1].getMessage()
    with pytest.raises(DeadlineExceeded, match=r"closed the connection before its Hello|no whole Hello came within"):
        SocketTransport().connect(listener.address, name=name, handler=Recorder(), who="ps", timeout_s=0.2)


def test_what_a_stranger_sends_forges_no_line_of_the_log(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    meta = b"\x81\xa4type\xb0x\nforged a line\n!"
    with dial(listener) as sock:
        sock.sendall(pack_header(Frame(Kind.NOTIFY, 0, meta, b"")) + meta)
        assert is_closed_by_the_other_side(sock)
    assert "forged" in caplog.records[-1].getMessage()
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["certificates", "secret"])
def test_off_loopback_one_of_us_is_served_and_no_one_else(listen: Listen, policy: str, secret: SharedSecret) -> None:
    security = certificates() if policy == "certificates" else secret
    address = f"{own_address()}:0"
    listener = listen(Limits(), security, address)
    assert serves(listener, security)
    with dial(listener) as sock:
        sock.sendall(hello("stranger")[:100])
        assert is_closed_by_the_other_side(sock)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_every_address_of_the_machine_takes_a_policy(listen: Listen, address: str) -> None:
    with pytest.raises(SecurityError, match=r"dflow certs init DIR(.|\n)*dflow certs issue(.|\n)*dflow certs secret"):
        listen(Limits(), None, address)
    listen(Limits(), certificates(), address)


def test_a_name_that_is_not_in_the_certificate_is_refused_by_either_side(listen: Listen) -> None:
    listener = listen(Limits(), certificates())
    transport = SocketTransport(security=certificates())
    with pytest.raises(
        SecurityError, match=r"ps at .*: the other side calls itself 'intruder', but its certificate is"
    ):
        transport.connect(listener.address, name="intruder", handler=Recorder(), who="ps", timeout_s=DEADLINE_S)
    other = transport.listen("127.0.0.1:0", name="intruder", handler=Recorder())
    with pytest.raises(SecurityError, match=r"ps at .* calls itself 'intruder', but its certificate is for server, "):
        transport.connect(other.address, name="me", handler=Recorder(), who="ps", timeout_s=DEADLINE_S)
    other.close()
