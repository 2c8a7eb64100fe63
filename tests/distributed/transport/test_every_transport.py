"""The contract of a transport, tested over each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dflow.distributed.transport.base import Handler, Listener, Peer, Responder
from dflow.distributed.transport.link import MIN_ALIGNED_BYTES, Limits
from dflow.distributed.wire.large_message import pack
from dflow.distributed.wire.messages.basic import Failure, Introduce, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.placement import Placed
from dflow.distributed.wire.messages.plans import Registered, RegisterPlan
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Packed, Roster, TaskInfo
from dflow.distributed.wire.messages.variables import ReadVariables
from dflow.lowering.values.alignment import ALIGNMENT_BYTES
from dflow.tracing import errors
from tests.distributed.transports import DEADLINE_S, KINDS, Kind, Recorder, echo, hold, reach


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


Serve = Callable[..., tuple[Peer, Recorder]]


@pytest.fixture
def serve(kind: Kind) -> Iterator[Serve]:
    """Start a server with the given handler, and connect a client to it."""
    listeners: list[Listener] = []

    def start(server: Handler, limits: Limits | None = None) -> tuple[Peer, Recorder]:
        transport = kind.make(limits)
        listeners.append(transport.listen(kind.free, name="server", handler=server))
        client = Recorder()
        return reach(transport, listeners[-1].address, client), client

    yield start
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, MIN_ALIGNED_BYTES, 65_537, 64 << 20])
def test_a_payload_comes_back_whole_aligned_and_writable(serve: Serve, size_bytes: int) -> None:
    peer, _ = serve(Recorder(echo))
    sent = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    message, payload = peer.call(Registered(1), sent.data, timeout_s=DEADLINE_S)
    received = np.frombuffer(payload, np.uint8)
    assert message == Registered(1)
    assert np.array_equal(received, sent)
    assert received.flags.writeable
    assert size_bytes < MIN_ALIGNED_BYTES or received.ctypes.data % ALIGNMENT_BYTES == 0


def test_replies_and_notices_of_a_handler_keep_their_order(serve: Serve) -> None:
    def announce(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        for number in range(50):
            peer.notify(Registered(number), bytes(100_000))
        responder.reply(Ok())

    peer, client = serve(Recorder(announce))
    peer.call(Ok(), timeout_s=DEADLINE_S)
    assert [client.notices.get_nowait()[0] for _ in range(50)] == [Registered(n) for n in range(50)]


def test_replies_may_come_later_from_another_thread_in_any_order(serve: Serve) -> None:
    held: list[tuple[Message, Responder]] = []

    def answer_in_reverse(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        held.append((message, responder))
        if len(held) == 5:
            threading.Thread(target=lambda: [r.reply(m) for m, r in reversed(held)]).start()

    peer, _ = serve(Recorder(answer_in_reverse))
    pending = [peer.start(Registered(number)) for number in range(5)]
    assert [p.wait(DEADLINE_S).message for p in pending] == [Registered(number) for number in range(5)]


def failing(error: Exception) -> Handler:
    """A handler that raises `error` at a request."""

    def fail(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        raise error

    return Recorder(fail)


def answering(*answer: Any) -> Handler:
    """A handler that answers a request with this message, and payload if any."""
    return Recorder(lambda peer, message, payload, responder: responder.reply(*answer))


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


FAILURES: dict[str, tuple[Handler, type[Exception], str]] = {
    "of dflow": (
        failing(noted(errors.VariableError("there is no variable 'w'"), "create it first")),
        *(errors.VariableError, "server: there is no variable 'w'\ncreate it first"),
    ),
    "of another class": (answering(Failure("ValueError", "why")), errors.RemoteError, "server failed: ValueError: why"),
    "of no class": (answering(Failure("annotations", "why")), errors.RemoteError, "server failed: annotations: why"),
    "enormous": (failing(ValueError("x" * 5_000_000)), errors.RemoteError, r"xxx \.\.\. \(\d+ more characters\)"),
    "not answered": (Handler(), errors.RemoteError, "NotImplementedError: RegisterPlan is not answered here"),
    "waiting": (
        Recorder(lambda peer, *_: peer.call(Ok(), timeout_s=DEADLINE_S)),
        *(errors.InternalError, "a handler waits for client to answer Ok"),
    ),
    "too large": (answering(Registered(1), bytes(101)), errors.WireError, "server: the payload of Registered has 101"),
    "not declared": (
        answering(Placed("elsewhere")),
        errors.WireError,
        "server answered RegisterPlan with Placed; expected Registered; install the same dflow on both",
    ),
    "not packed": (answering(Packed(), b"broken"), errors.WireError, "a packed message cannot be decompressed"),
}


@pytest.mark.parametrize(("server", "kind_of_error", "text"), FAILURES.values(), ids=FAILURES)
def test_a_call_that_fails_raises_an_error_that_names_the_peer(
    serve: Serve, server: Handler, kind_of_error: type[Exception], text: str
) -> None:
    peer, _ = serve(server, Limits(max_payload_bytes=100))
    with pytest.raises(kind_of_error, match=text):
        peer.call(RegisterPlan(b"", ()), timeout_s=DEADLINE_S)
    peer.notify(Ok())


def test_a_packed_reply_arrives_unpacked(serve: Serve) -> None:
    roster = Roster((TaskInfo("/job:ps/task:0", "h:1", 0.0),), ())
    peer, _ = serve(answering(*pack(roster, goes_to_many=True)))
    assert peer.call(Join("client", "h:2"), timeout_s=DEADLINE_S).message == roster


def test_a_second_answer_is_a_fault_of_the_handler(serve: Serve) -> None:
    faults: list[BaseException] = []

    def twice(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        responder.reply(Ok())
        try:
            responder.reply(Ok())
        except errors.InternalError as error:
            faults.append(error)

    peer, _ = serve(Recorder(twice))
    peer.call(Introduce(0), timeout_s=DEADLINE_S)
    peer.call(Introduce(0), timeout_s=DEADLINE_S)
    assert "Introduce from client was answered twice" in str(faults[0])


def test_a_call_without_an_answer_ends_at_its_deadline(serve: Serve) -> None:
    peer, _ = serve(Recorder(hold(threading.Event())))
    with pytest.raises(errors.DeadlineExceeded, match=r"server did not answer ReadVariables of client within 0\.05 s"):
        peer.call(ReadVariables(("w",)), timeout_s=0.05)


def test_closing_ends_the_waiting_calls(serve: Serve) -> None:
    asked = threading.Event()
    server = Recorder(hold(asked))
    peer, client = serve(server)
    pending = peer.start(ReadVariables(("w",)))
    assert asked.wait(DEADLINE_S)
    peer.close("no longer needed")
    with pytest.raises(errors.TransportClosed, match=r"client to server has ended while .* ReadVariables: no longer"):
        pending.wait(DEADLINE_S)
    assert client.close_reason() == "no longer needed"
    assert server.close_reason() == "the other side closed the connection"
    with pytest.raises(errors.TransportClosed, match="no longer needed"):
        peer.call(Ok(), timeout_s=DEADLINE_S)
    peer.close("again")
    assert peer.closed == "no longer needed"
    assert client.closed.empty()


class TellsOfEnds(Recorder):
    """Tells the peers that have asked it something of each connection that ends, on the thread that learns of it."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        super().__init__(self.keep)

    def keep(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        self.peers.append(peer)
        responder.reply(Ok())

    def on_close(self, peer: Peer, reason: str) -> None:
        for other in self.peers:
            if not other.closed:
                other.notify(Placed(peer.name))


def test_what_a_handler_sends_at_the_end_of_a_connection_arrives(kind: Kind) -> None:
    transport, server, client = kind.make(None), TellsOfEnds(), Recorder()
    listener = transport.listen(kind.free, name="server", handler=server)
    reach(transport, listener.address, client, name="one").call(Ok(), timeout_s=DEADLINE_S)
    reach(transport, listener.address, Recorder(), name="two").close()
    assert client.notice() == (Placed("two"), b"")
    listener.close()


def test_a_listener_that_closes_ends_its_connections(kind: Kind) -> None:
    transport, server, client, asked = kind.make(None), Recorder(), Recorder(), threading.Event()
    server._answer = hold(asked)
    listener = transport.listen(kind.free, name="server", handler=server)
    peer = reach(transport, listener.address, client)
    pending = peer.start(ReadVariables(("w",)))
    assert asked.wait(DEADLINE_S)
    listener.close()
    listener.close()
    with pytest.raises(errors.TransportClosed, match="the other side closed the connection"):
        pending.wait(DEADLINE_S)
    assert server.close_reason() == "server stopped listening"
    with pytest.raises(errors.DeadlineExceeded):
        transport.connect(listener.address, name="client", handler=client, who="server", timeout_s=0.05)


def test_connecting_to_no_one_names_who_where_and_how_long(kind: Kind) -> None:
    expected = rf"coordinator at {kind.nobody} could not be reached within 0\.1 s: .*check that it runs"
    with pytest.raises(errors.DeadlineExceeded, match=expected):
        kind.make(None).connect(kind.nobody, name="me", handler=Recorder(), who="coordinator", timeout_s=0.1)


def test_an_address_is_listened_on_once(kind: Kind) -> None:
    transport = kind.make(None)
    listener = transport.listen(kind.free, name="one", handler=Recorder())
    with pytest.raises(OSError, match="already"):
        transport.listen(listener.address, name="two", handler=Recorder())
    listener.close()


def test_a_message_over_the_senders_limits_is_refused_at_the_sender(serve: Serve) -> None:
    peer, _ = serve(Recorder(echo), Limits(max_meta_bytes=100, max_payload_bytes=10))
    with pytest.raises(errors.WireError, match=r"ReadVariables takes \d+ bytes, over the limit of 100; move"):
        peer.call(ReadVariables(("w" * 200,)), timeout_s=DEADLINE_S)
    with pytest.raises(errors.WireError, match="payload of Ok has 11 bytes, over the limit of 10; send it in parts"):
        peer.notify(Ok(), bytes(11))
    assert peer.call(Ok(), bytes(10), timeout_s=DEADLINE_S).message == Ok()


def test_both_sides_may_flood_each_other(serve: Serve) -> None:
    """Handlers whose answers exceed the sockets' buffers do not deadlock when both sides send requests concurrently."""
    server_side: list[Peer] = []

    def large(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        server_side.append(peer)
        responder.reply(Ok(), payload)

    peer, client = serve(Recorder(large))
    client._answer = large
    peer.call(Ok(), timeout_s=DEADLINE_S)

    def ask(end: Peer) -> int:
        return sum(len(end.call(Ok(), bytes(8 << 20), timeout_s=DEADLINE_S).payload) for _ in range(4))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, [peer, server_side[0]] * 4)) == [32 << 20] * 8


def test_the_last_words_before_a_close_arrive(serve: Serve) -> None:
    server = Recorder()
    peer, _ = serve(server)
    peer.notify(Heartbeat("/job:worker/task:0"))
    peer.close()
    assert server.notice()[0] == Heartbeat("/job:worker/task:0")


def test_the_answer_of_a_handler_that_then_closes_arrives(serve: Serve) -> None:
    def answer_and_close(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        responder.reply(Placed("last"))
        peer.close()

    peer, _ = serve(Recorder(answer_and_close))
    assert peer.call(Ok(), timeout_s=DEADLINE_S).message == Placed("last")


@pytest.mark.parametrize("size_bytes", [0, 10, 1 << 20])
def test_a_sender_is_told_once_when_the_memory_of_a_payload_is_free(serve: Serve, size_bytes: int) -> None:
    server = Recorder(echo)
    peer, _ = serve(server)
    released = threading.Semaphore(0)
    peer.notify(Ok(), bytes(size_bytes), released.release)
    assert server.notice() == (Ok(), bytes(size_bytes))
    assert peer.call(Ok(), timeout_s=DEADLINE_S)
    assert released.acquire(timeout=DEADLINE_S)
    peer.close()
    assert not released.acquire(blocking=False)


def test_a_reply_is_told_before_what_comes_after_it(kind: Kind) -> None:
    told: list[str] = []

    class Handler(Recorder):
        def on_notify(self, peer: Peer, message: Message, payload: memoryview) -> None:
            told.append("notice")
            super().on_notify(peer, message, payload)

    def answer(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        responder.reply(Ok())
        peer.notify(Ok())

    transport = kind.make(None)
    listener = transport.listen(kind.free, name="server", handler=Recorder(answer))
    handler = Handler()
    peer = reach(transport, listener.address, handler)
    for _ in range(100):
        peer.start(Ok(), on_reply=lambda reply: told.append("reply"))
        handler.notice()
    listener.close()
    assert told == ["reply", "notice"] * 100
