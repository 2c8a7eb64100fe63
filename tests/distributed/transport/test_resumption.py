"""Connections whose sockets break: no message is lost or handled twice while both processes live."""

from __future__ import annotations

import itertools
import logging
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflow.distributed.transport import listener as listener_module
from dflow.distributed.transport.base import Listener, Peer, Responder
from dflow.distributed.transport.link import Kind, Limits
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.transport.stream import Deadline, Stream
from dflow.distributed.wire.messages.basic import Failure, Hello, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.plans import Registered
from dflow.tracing import errors
from tests.distributed.proxy import Proxy
from tests.distributed.transports import DEADLINE_S, Recorder, dial_raw, echo, frame, reach
from tests.effort import examples

#: A session with this time-out ends by its peer's death, or the test's deadline fails.
PATIENT = Limits(resume_s=DEADLINE_S)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = SocketTransport(PATIENT).listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    yield made
    made.close()


@pytest.mark.once
@pytest.mark.parametrize("seed", range(examples(3)))
def test_calls_and_values_flow_once_each_over_sockets_that_are_cut_at_any_byte(seed: int) -> None:
    draw = random.Random(seed)
    calls: list[int] = []
    server_side: list[Peer] = []

    def answer(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        assert isinstance(message, Registered)
        calls.append(message.handle)
        server_side.append(peer)
        responder.reply(message, payload)

    server, client = Recorder(answer), Recorder()
    transport = SocketTransport(PATIENT)
    listener = transport.listen("127.0.0.1:0", name="server", handler=server)
    proxy = Proxy(listener.address, draw, most_bytes=1_000_000)
    sizes = [draw.choice((0, 5, 1000, 20_000, 70_000, 300_000)) for _ in range(60)]
    try:
        peer = reach(transport, proxy.address, client)
        peer.call(Registered(-1), timeout_s=DEADLINE_S)

        def ask(number: int) -> None:
            payload = number.to_bytes(4, "big") * (sizes[number % len(sizes)] // 4)
            reply = peer.call(Registered(number), payload, timeout_s=DEADLINE_S)
            assert (reply.message, bytes(reply.payload)) == (Registered(number), payload)

        def tell(teller: Peer, start: int) -> None:
            for number in range(start, start + 60):
                teller.notify(Registered(number), bytes([number % 251]) * sizes[number % len(sizes)])

        with ThreadPoolExecutor(4) as pool:
            told = [pool.submit(tell, peer, 1000), pool.submit(tell, server_side[0], 2000)]
            list(pool.map(ask, range(80)))
            for one in told:
                one.result(DEADLINE_S)
        for listening, start in ((server, 1000), (client, 2000)):
            for number in range(start, start + 60):
                expected = (Registered(number), bytes([number % 251]) * sizes[number % len(sizes)])
                assert listening.notice() == expected
            assert listening.notices.empty()
        assert sorted(calls) == list(range(-1, 80))
        assert proxy.connections > 1
        assert len(set(map(id, server_side))) == 1
        assert not peer.closed
    finally:
        proxy.close()
        listener.close()


def test_a_session_of_which_the_other_side_knows_nothing_ends() -> None:
    transport = SocketTransport(PATIENT)
    first = transport.listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    proxy = Proxy(first.address, random.Random(0), most_bytes=1 << 30)
    client = Recorder()
    reach(transport, proxy.address, client)
    second = transport.listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    proxy.turn_to(second.address)
    proxy.cut()
    assert "server knows nothing of this connection any more" in client.close_reason()
    for one in (proxy, first, second):
        one.close()


def test_a_peer_that_cannot_be_reached_again_is_given_up() -> None:
    limits = Limits(resume_s=0.05)
    server, client = Recorder(echo), Recorder()
    listener = SocketTransport(limits).listen("127.0.0.1:0", name="server", handler=server)
    proxy = Proxy(listener.address, random.Random(0), most_bytes=1 << 30)
    reach(SocketTransport(limits), proxy.address, client).call(Ok(), timeout_s=DEADLINE_S)
    proxy.cuts_at_once = True
    proxy.cut()
    assert "could not be reached again within 0.05 s" in client.close_reason()
    assert "did not come back within 0.05 s" in server.close_reason()
    proxy.close()
    listener.close()


CLIENT = """
import sys, threading
from dflow.distributed.wire.messages.placement import Placed
from dflow.distributed.transport.base import Handler
from dflow.distributed.transport.sockets import SocketTransport
peer = SocketTransport().connect(sys.argv[1], name="child", handler=Handler(), who="server", timeout_s=60)
peer.notify(Placed("here"))
threading.Event().wait()
"""

SERVER = """
import threading
from dflow.distributed.transport.base import Handler
from dflow.distributed.transport.sockets import SocketTransport
print(SocketTransport().listen("127.0.0.1:0", name="child", handler=Handler()).address, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("address", ["127.0.0.1:0", "unix:"])
def test_the_death_of_a_process_that_dialled_is_seen_without_waiting_for_it_to_come_back(address: str) -> None:
    server = Recorder()
    listener = SocketTransport(Limits(resume_s=1e4)).listen(address, name="server", handler=server)
    with subprocess.Popen([sys.executable, "-c", CLIENT, listener.address]) as child:
        server.notice()
        child.send_signal(signal.SIGKILL)
    assert "ended" in server.close_reason()
    listener.close()


def test_the_death_of_a_process_that_listened_is_seen_without_dialling_for_long() -> None:
    client = Recorder()
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        reach(SocketTransport(Limits(resume_s=1e4)), child.stdout.readline().strip(), client)
        child.send_signal(signal.SIGKILL)
        reason = client.close_reason()
    assert "nothing listens there any more" in reason


def test_a_broken_session_ends_when_another_process_comes_by_its_name() -> None:
    server = Recorder()
    transport = SocketTransport(Limits(resume_s=1e4))
    listener = transport.listen("127.0.0.1:0", name="server", handler=server)
    proxy = Proxy(listener.address, random.Random(0), most_bytes=1 << 30)
    with subprocess.Popen([sys.executable, "-c", CLIENT, proxy.address]) as child:
        server.notice()
        proxy.cuts_at_once = True
        proxy.cut()
        reasons = {""}
        # The server may notice the cut after other clients have connected.
        while "another process has come as child" not in reasons:
            reach(transport, listener.address, Recorder(), name="child").close()
            reasons.add(server.close_reason())
        child.kill()
    proxy.close()
    listener.close()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Hello("other", session="s", process="p", resumes=True), "other is not stranger, whose session it wants"),
        (Hello("stranger", session="s", process="q", resumes=True), "stranger has restarted, but wants to resume"),
    ],
    ids=["another name", "another process"],
)
def test_a_session_is_resumed_by_none_but_its_own_process(
    other: Hello, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dflow")
    listener = SocketTransport(PATIENT).listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    with dial_raw(listener, frame(Hello("stranger", session="s", process="p"))) as first:
        for sequence in (1, 2):
            first.sendall(frame(Ok(), kind=Kind.REQUEST, sequence=sequence))
            hear_answer(first)
            if sequence == 1:
                # After an answer to a request, the session is known.
                with dial_raw(listener, frame(other)) as second:
                    assert second.recv(1) == b""
    assert why in "".join(record.getMessage() for record in caplog.records)
    listener.close()


def test_a_session_may_be_resumed_as_soon_as_it_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    is_back = threading.Event()
    calls = itertools.count()
    answers = listener_module.say_hello

    def answer(stream: Stream, hello: Hello | Failure, deadline: Deadline) -> None:
        """Stop after the first answer, until the other side has come back."""
        answers(stream, hello, deadline)
        if next(calls) == 0:
            assert is_back.wait(DEADLINE_S)

    found = listener_module.SocketListener._find

    def find(*arguments: Any) -> Any:
        is_back.set()
        return found(*arguments)

    monkeypatch.setattr(listener_module, "say_hello", answer)
    monkeypatch.setattr(listener_module.SocketListener, "_find", find)
    listener = SocketTransport(PATIENT).listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    with dial_raw(listener, frame(Hello("stranger", session="s", process="p"))) as first:
        assert first.recv(1)
    with dial_raw(listener, frame(Hello("stranger", session="s", process="p", resumes=True))) as second:
        second.sendall(frame(Ok(), kind=Kind.REQUEST, sequence=1))
        hear_answer(second)
    listener.close()


def test_a_session_is_resumed_although_its_last_socket_seems_alive() -> None:
    listener = SocketTransport(PATIENT).listen("127.0.0.1:0", name="server", handler=Recorder(echo))
    with dial_raw(listener, frame(Hello("stranger", session="s", process="p"))) as first:
        first.sendall(frame(Ok(), kind=Kind.REQUEST, sequence=1))
        hear_answer(first)
        with dial_raw(listener, frame(Hello("stranger", session="s", process="p", resumes=True, received=1))) as second:
            second.sendall(frame(Ok(), kind=Kind.REQUEST, sequence=2))
            hear_answer(second)
        assert first.recv(1) == b""
    listener.close()


def hear_answer(sock: socket.socket) -> None:
    """Read until an `Ok` has arrived."""
    heard = b""
    while b"Ok" not in heard:
        heard += sock.recv(1 << 16) or pytest.fail("it closed the connection")


def test_a_sender_waits_while_much_is_not_acknowledged_and_says_so_at_the_deadline() -> None:
    limits = Limits(max_retained_bytes=1 << 16, stall_timeout_s=0.05, resume_s=DEADLINE_S)
    entered, leave = threading.Event(), threading.Event()

    class Stuck(Recorder):
        """A handler that blocks, which the rules forbid."""

        def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
            entered.set()
            leave.wait(DEADLINE_S)

    listener = SocketTransport(limits).listen("127.0.0.1:0", name="server", handler=Stuck())
    peer = reach(SocketTransport(limits), listener.address, Recorder())
    peer.notify(Ok(), bytes(1 << 17))
    assert entered.wait(DEADLINE_S)
    with pytest.raises(errors.TransportClosed, match=r"took nothing of \d+ bytes for 0\.05 s"):
        peer.notify(Ok())
    leave.set()
    listener.close()
