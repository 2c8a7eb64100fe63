"""What only sockets can get wrong: bytes that are no frames, slow peers, addresses, strangers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.addresses import LOCAL_ADDRESS, Address
from dflow.distributed.transport.base import Responder
from dflow.distributed.transport.framing import HEADER, MAGIC
from dflow.distributed.transport.link import Kind, Limits
from dflow.distributed.transport.security.policy import SameMachine, Secured
from dflow.distributed.transport.sockets import SocketListener, SocketTransport
from dflow.distributed.transport.stream import Deadline, Stream
from dflow.distributed.wire.codec import encode_message
from dflow.distributed.wire.messages.basic import PROTOCOL_VERSION, Hello, Ok
from dflow.distributed.wire.messages.placement import Placed
from dflow.distributed.wire.messages.transfers import Values
from dflow.tracing import errors
from tests.distributed.transports import (
    DEADLINE_S,
    Recorder,
    dial_raw,
    echo,
    frame,
    reach,
    read_until_closed,
    still_serves,
)
from tests.effort import examples

LIMITS = Limits(
    max_meta_bytes=1 << 16, max_payload_bytes=1 << 20, max_connections=64, hello_timeout_s=DEADLINE_S, resume_s=0.0
)
HUGE = (1 << 64) - 1


HELLO = frame(Hello("stranger", session="s"))
OK = frame(Ok(), kind=Kind.REQUEST, number=1, sequence=1)


def header(
    magic: bytes = MAGIC,
    kind: int = 1,
    payload: int = 0,
    meta: int = 0,
    flags: int = 0,
    pad: int = 0,
    sequence: int = 1,
) -> bytes:
    return HEADER.pack(magic, kind, flags, pad, meta, 1, payload, sequence, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[SocketListener]:
    listener = SocketTransport(LIMITS).listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    yield listener
    listener.close()


def send(sock: socket.socket, data: bytes, *, ends: bool = False) -> None:
    """Send what the server takes before it closes the connection."""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        if ends:
            sock.shutdown(socket.SHUT_WR)


# Each ends the connection by itself: the client keeps its side open and waits for the server to close.
BEFORE_HELLO = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(64),
    "a long hello": header(kind=3, meta=5000) + bytes(5000),
    "hello with a payload": header(kind=3, meta=len(encode_message(Hello("x"))), payload=1 << 19, sequence=0),
    "hello with a huge payload": header(kind=3, meta=10, payload=HUGE),
    "a request first": OK,
    "garbage where the hello is": header(kind=3, meta=4) + b"\xff\xff\xff\xff",
    "another version": frame(Hello("old", version=PROTOCOL_VERSION + 1)),
    "a hello without a session": frame(Hello("stranger")),
}
AFTER_HELLO = {
    "wrong magic": header(magic=b"DFLX"),
    "unknown kind": header(kind=9),
    "kind zero": header(kind=0),
    "padding that is not zero": header(pad=256),
    "unknown flags": header(flags=2),
    "a message without a number": frame(Ok()),
    "a message that skips a number": frame(Ok(), sequence=2),
    "an acknowledgement of nothing": HEADER.pack(MAGIC, 4, 0, 0, 0, 0, 0, 0, 1),
    "huge message": header(meta=(1 << 32) - 1),
    "message just over the limit": header(meta=LIMITS.max_meta_bytes + 1),
    "huge payload": header(payload=HUGE),
    "payload just over the limit": header(payload=LIMITS.max_payload_bytes + 1),
    "no message": header(),
    "garbage message": header(meta=5) + b"\xc1\xc1\xc1\xc1\xc1",
    "unknown tag": header(meta=15) + b"\x81\xa4type\xa8Explode!",
    "fields of other types": header(meta=18) + b"\x82\xa4type\xa5Hello\xa4name\x03",
    "deeply nested": header(meta=60_000) + b"\x91" * 60_000,
    "a second frame that is none": OK + b"rubbish" * 7,
}


@pytest.mark.parametrize(
    "data",
    [*BEFORE_HELLO.values(), *(HELLO + data for data in AFTER_HELLO.values())],
    ids=[*BEFORE_HELLO, *AFTER_HELLO],
)
def test_bytes_that_are_no_frames_end_their_connection_alone(server: SocketListener, data: bytes) -> None:
    with dial_raw(server) as sock:
        send(sock, data)
        read_until_closed(sock)
    assert still_serves(server)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hello=st.booleans(),
    head=st.sampled_from([b"", MAGIC, OK, header(meta=9), frame(Values("o", 1, "e"), bytes(7))]),
    tail=st.binary(max_size=300),
)
def test_any_bytes_leave_the_server_serving(server: SocketListener, hello: bool, head: bytes, tail: bytes) -> None:
    with dial_raw(server) as sock:
        send(sock, (HELLO if hello else b"") + head + tail, ends=True)
        read_until_closed(sock)
    assert still_serves(server)


def reasons(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def listen(limits: Limits, recorder: Recorder | None = None) -> SocketListener:
    return SocketTransport(limits).listen("127.0.0.1:0", name="server", handler=recorder or Recorder(echo))


def test_the_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    recorder = Recorder(echo)
    listener = listen(LIMITS, recorder)
    with dial_raw(listener, HELLO + header(payload=HUGE)) as sock:
        read_until_closed(sock)
    reason = recorder.close_reason()
    assert f"a payload of {HUGE} bytes is over the limit of {LIMITS.max_payload_bytes}" in reason
    assert f"connection to stranger closed: {reason}" in reasons(caplog)
    listener.close()


def test_a_late_hello_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits(hello_timeout_s=0.05))
    with dial_raw(listener, HELLO[:-1]) as sock:
        read_until_closed(sock)
    assert still_serves(listener)
    assert "no whole Hello came within 0.05 s" in reasons(caplog)
    listener.close()


def test_a_connection_that_waits_for_the_rest_of_a_large_frame_keeps_no_other_waiting() -> None:
    listener = listen(Limits())
    request = frame(Ok(), bytes(1 << 20), Kind.REQUEST, 1, 1)
    with dial_raw(listener, HELLO + request[: 1 << 19]) as sock:
        for _ in range(3):
            assert still_serves(listener)
        sock.sendall(request[1 << 19 :] + frame(Ok(), b"behind", Kind.REQUEST, 2, 2))
        sock.shutdown(socket.SHUT_WR)
        assert read_until_closed(sock).endswith(b"behind")
    listener.close()


@pytest.mark.parametrize("ends", [False, True])
def test_a_frame_that_stalls_or_breaks_off_ends_its_connection(ends: bool) -> None:
    recorder = Recorder(echo)
    listener = listen(Limits(stall_timeout_s=DEADLINE_S if ends else 0.05, resume_s=0.0), recorder)
    with dial_raw(listener) as sock:
        send(sock, HELLO + OK[:-1], ends=ends)
        why = "closed the connection in the middle of a frame" if ends else "went on for 0.05 s without a byte"
        assert why in recorder.close_reason()
    listener.close()


def test_more_pieces_are_sent_than_the_system_takes_at_once() -> None:
    near, far = socket.socketpair()
    with near, far:
        parts: list[memoryview] = [memoryview(b"%04d" % number) for number in range(3000)]
        for waits in (True, False):
            sent = Stream(near).send(parts, waits=waits)
            assert 0 < sent < 4 * len(parts)
            assert far.recv(1 << 20) == b"".join(parts)[:sent]


@pytest.mark.parametrize(
    ("limits", "why"),
    [(Limits(stall_timeout_s=0.05, resume_s=0.0), ""), (Limits(max_unsent=3, resume_s=0.0), "leaves 3 frames unread")],
    ids=["no room for long", "too many unread"],
)
def test_a_peer_that_does_not_read_its_replies_loses_its_connection(limits: Limits, why: str) -> None:
    recorder = Recorder(echo)
    listener = listen(limits, recorder)
    with dial_raw(listener, HELLO) as sock, pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):  # noqa: PT012
        for number in range(1, 1000):
            sock.sendall(frame(Ok(), bytes(4 << 20), Kind.REQUEST, number, number))
    assert why in recorder.close_reason() != ""
    listener.close()


def test_no_more_connections_than_allowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = listen(Limits(max_connections=2))
    first, second = (reach(SocketTransport(), listener.address, Recorder()) for _ in range(2))
    for peer in (first, second):
        # Now the listener knows it, and has not only answered its Hello.
        peer.call(Ok(), timeout_s=DEADLINE_S)
    full = "has 2 connections and takes no more, which is its limit; start fewer tasks"
    with pytest.raises(errors.DeadlineExceeded, match=full) as raised:
        SocketTransport().connect(listener.address, name="third", handler=Recorder(), who="ps", timeout_s=0.1)
    assert "certificates" not in str(raised.value)
    assert full in reasons(caplog)
    first.close()
    third = reach(SocketTransport(), listener.address, Recorder())
    assert third.call(Ok(), timeout_s=DEADLINE_S).message == Ok()
    assert second.call(Ok(), timeout_s=DEADLINE_S).message == Ok()
    listener.close()


def test_a_server_of_another_version_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:

        def serve() -> None:
            accepted, _ = sock.accept()
            with accepted:
                accepted.sendall(frame(Hello("new", version=PROTOCOL_VERSION + 1)))
                read_until_closed(accepted)

        thread = threading.Thread(target=serve)
        thread.start()
        expected = f"ps at 127.0.0.1:.* new speaks protocol version {PROTOCOL_VERSION + 1} and this side version"
        with pytest.raises(errors.WireError, match=expected):
            SocketTransport().connect(
                f"127.0.0.1:{sock.getsockname()[1]}", name="me", handler=Recorder(), who="ps", timeout_s=DEADLINE_S
            )
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "192.0.2.1:80", "example.com:80", "[::]:0", ":0"])
def test_only_loopback_is_used(address: str) -> None:
    remedy = r"dflow certs init DIR(.|\n)*dflow certs issue(.|\n)*dflow certs secret"
    text = f"not a loopback address, and no certificates or secret(.|\n)*{remedy}"
    with pytest.raises(errors.SecurityError, match=text):
        SocketTransport().listen(address, name="me", handler=Recorder())
    with pytest.raises(errors.SecurityError, match=text):
        SocketTransport().connect(address, name="me", handler=Recorder(), who="ps", timeout_s=DEADLINE_S)


def test_a_message_whose_sending_is_interrupted_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Recorder()
    listener = SocketTransport().listen("127.0.0.1:0", name="server", handler=server)
    peer = reach(SocketTransport(), listener.address, Recorder())
    sends = Stream.send

    def interrupted(self: Stream, parts: Sequence[memoryview], *, waits: bool = True) -> int:
        monkeypatch.setattr(Stream, "send", sends)
        sends(self, [parts[0][:20]])
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peer.notify(Placed("first"))
    peer.notify(Placed("second"))
    assert [server.notice()[0] for _ in range(2)] == [Placed("first"), Placed("second")]
    listener.close()


def test_responses_after_the_asker_left_are_dropped() -> None:
    held: queue.SimpleQueue[Responder] = queue.SimpleQueue()
    recorder = Recorder(lambda peer, message, payload, responder: held.put(responder))
    listener = listen(Limits(), recorder)
    peer = reach(SocketTransport(), listener.address, Recorder())
    peer.start(Ok())
    responder = held.get(timeout=DEADLINE_S)
    peer.close()
    recorder.close_reason()
    responder.reply(Ok())
    listener.close()


def test_a_unix_socket_lives_in_a_folder_of_this_user_alone_until_it_is_closed() -> None:
    listener = SocketTransport().listen("unix:", name="server", handler=Recorder())
    path = Path(listener.address.removeprefix("unix:"))
    assert path.is_socket()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    listener.close()
    assert not path.parent.exists()


def test_a_path_whose_listener_has_died_is_used_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(f"{tmp_path}/socket")
    dead.close()
    listener = SocketTransport().listen(address, name="server", handler=Recorder())
    assert reach(SocketTransport(), address, Recorder()).name == "server"
    listener.close()


def test_a_unix_socket_is_for_processes_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = SocketTransport().listen("unix:", name="server", handler=Recorder())
    monkeypatch.setattr("dflow.distributed.transport.security.policy.peer_uid", lambda sock: os.geteuid() + 1)
    with pytest.raises(errors.SecurityError, match=r"ps at unix:.* of user \d+ and this one of user \d+; run both"):
        SocketTransport().connect(listener.address, name="me", handler=Recorder(), who="ps", timeout_s=DEADLINE_S)
    listener.close()


def test_folders_that_killed_processes_left_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    made = {}
    for name in ("dead", "young", "alive"):
        (tmp_path / f"dflow-task-{name}").mkdir()
        made[name] = socket.socket(socket.AF_UNIX)
        made[name].bind(str(tmp_path / f"dflow-task-{name}" / "socket"))
        if name != "young":
            os.utime(tmp_path / f"dflow-task-{name}", (0, 0))
    made["alive"].listen()
    made["dead"].close()
    listener = SocketTransport().listen("unix:", name="server", handler=Recorder())
    assert {path.name for path in tmp_path.iterdir()} >= {"dflow-task-young", "dflow-task-alive"}
    assert not (tmp_path / "dflow-task-dead").exists()
    listener.close()
    for sock in made.values():
        sock.close()


class _Watched(SameMachine):
    """Keeps by which kind of socket connections are made."""

    def __init__(self) -> None:
        self.families: list[int] = []

    def secure(self, sock: socket.socket, address: Address, deadline: Deadline, *, is_server: bool) -> Secured:
        self.families.append(sock.family)
        return super().secure(sock, address, deadline, is_server=is_server)


@pytest.mark.parametrize("way", ["near", "far", "gone"])
def test_the_unix_socket_of_a_task_is_for_who_is_on_its_machine(way: str) -> None:
    listener = SocketTransport().listen(LOCAL_ADDRESS, name="server", handler=Recorder(echo))
    address, watched = listener.address, _Watched()
    if way == "far":
        address = address.replace("@", "@another")
    if way == "gone":
        address = address.replace("/socket@", "/none@")
    peer = reach(SocketTransport(None, watched), address, Recorder())
    assert peer.call(Ok(), timeout_s=DEADLINE_S).message == Ok()
    assert watched.families == [socket.AF_UNIX if way == "near" else socket.AF_INET]
    listener.close()
