"""Listeners and unauthenticated peers: the waits of these, their limits and their cost, and that other peers get in."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflow.distributed.transport.framing import pack_header
from dflow.distributed.transport.link import Frame, Kind, Limits
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.distributed.transport.sockets import SocketListener, SocketTransport
from dflow.distributed.wire.messages.basic import Hello
from dflow.tracing.errors import DeadlineExceeded, SecurityError
from tests.distributed.transports import (
    DEADLINE_S,
    Recorder,
    certificates,
    dial_raw,
    echo,
    frame,
    own_address,
    read_until_closed,
    still_serves,
)


@pytest.fixture
def secret(tmp_path: Path) -> SharedSecret:
    path = tmp_path / "secret"
    path.write_text("s" * 64)
    path.chmod(0o600)
    return SharedSecret(path)


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


def hello(name: str) -> bytes:
    return frame(Hello(name, session="s"))


@pytest.mark.parametrize("said", [0, 31, 40])
@pytest.mark.parametrize("policy", ["same machine", "certificates"])
def test_a_stranger_that_says_too_little_goes_when_its_time_is_up(listen: Listen, said: int, policy: str) -> None:
    security = certificates() if policy == "certificates" else None
    listener = listen(Limits(hello_timeout_s=0.1), security)
    with dial_raw(listener, hello("stranger")[:said]) as sock:
        read_until_closed(sock)
    assert still_serves(listener, security)


@pytest.mark.parametrize("policy", ["same machine", "certificates", "secret"])
def test_a_crowd_of_silent_strangers_keeps_nobody_out(listen: Listen, policy: str, secret: SharedSecret) -> None:
    """Their time does not expire: a new connection gets in because the oldest one is closed."""
    security = {"same machine": None, "certificates": certificates(), "secret": secret}[policy]
    listener = listen(Limits(hello_timeout_s=1000.0, max_unauthenticated=8, max_from_source=8), security)
    with contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(dial_raw(listener)) for _ in range(20)]
        for sock in silent[:12]:
            read_until_closed(sock)
        assert still_serves(listener, security)
        assert len(listener._admission.unauthenticated) <= 8


def test_a_knocking_stranger_does_not_fill_the_log(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    for _ in range(100):
        with dial_raw(listener, b"x" * 32) as sock:
            read_until_closed(sock)
    assert len(caplog.records) <= 20


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
    with dial_raw(listener) as sock:
        read_until_closed(sock)
    assert still_serves(listener)


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nWARNING forged", "\x1b[2J"])
def test_a_name_that_cannot_stand_in_a_log_is_refused(
    listen: Listen, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    with dial_raw(listener, hello(name)) as sock:
        read_until_closed(sock)
    assert f"a name of {len(name)} characters" in caplog.records[-1].getMessage()
    with pytest.raises(DeadlineExceeded, match=r"closed the connection before its Hello|no whole Hello came within"):
        SocketTransport().connect(listener.address, name=name, handler=Recorder(), who="ps", timeout_s=0.2)


def test_what_a_stranger_sends_forges_no_line_of_the_log(listen: Listen, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits())
    meta = b"\x81\xa4type\xb0x\nforged a line\n!"
    with dial_raw(listener, pack_header(Frame(Kind.NOTIFY, 0, meta, b"")) + meta) as sock:
        read_until_closed(sock)
    assert "forged" in caplog.records[-1].getMessage()
    assert all("\n" not in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("policy", ["certificates", "secret"])
def test_off_loopback_one_of_us_is_served_and_no_one_else(listen: Listen, policy: str, secret: SharedSecret) -> None:
    security = certificates() if policy == "certificates" else secret
    address = f"{own_address()}:0"
    listener = listen(Limits(), security, address)
    assert still_serves(listener, security)
    with dial_raw(listener, hello("stranger")[:100]) as sock:
        read_until_closed(sock)


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
