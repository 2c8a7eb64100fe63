"""Connections to tasks by name: to the right process, for as long as the roster has it, one attempt for all waits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from dflow.distributed.steps.peers import Peers
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Listener, Peer, Responder, Transport
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.basic import Introduce, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.lowering.values.computed import before_waiting
from dflow.tracing.errors import DeadlineExceeded, TaskLost
from tests.distributed.transports import DEADLINE_S, Recorder

PS0, WORKER0 = "/job:ps/task:0", "/job:worker/task:0"


def peers_of(transport: Transport, address: str = "memory:1", **settings: Any) -> Peers:
    """The worker's connections, which know the ps at this address."""
    made = Peers(transport, name=WORKER0, handler=Recorder(), **{"connect_timeout_s": DEADLINE_S, **settings})
    made.set_addresses({PS0: address})
    return made


class Acting:
    """A transport that calls `act` with the number of each attempt to connect; an attempt fails without `network`."""

    def __init__(self, act: Callable[[int], object], network: Transport | None = None) -> None:
        self.network, self.act, self.attempts = network, act, list[str]()
        self.listen: Any = network.listen if network is not None else None

    def connect(self, address: str, **settings: Any) -> Peer:
        self.attempts.append(threading.current_thread().name)
        self.act(len(self.attempts))
        if self.network is None:
            raise DeadlineExceeded("no answer")
        return self.network.connect(address, **settings)


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def ps(network: MemoryNetwork) -> Iterator[Listener]:
    listener = network.listen("", name=PS0, handler=Recorder())
    yield listener
    listener.close()


def test_whoever_answers_at_a_tasks_address_is_that_task_or_not_spoken_to(network: MemoryNetwork) -> None:
    other = Recorder()
    listener = network.listen("", name="/job:ps/task:1", handler=other)
    peers = peers_of(network)
    peers.set_addresses({PS0: listener.address, "/job:ps/task:1": listener.address})
    with pytest.raises(TaskLost, match=f"{PS0} is not at memory:1 any more, where /job:ps/task:1 answers"):
        peers.get(PS0)
    assert other.closed.get(timeout=DEADLINE_S)
    assert peers.get("/job:ps/task:1").name == "/job:ps/task:1"
    peers.close()
    listener.close()


def test_a_connection_to_a_task_that_leaves_while_it_is_made_is_not_kept(network: MemoryNetwork, ps: Listener) -> None:
    made = list[Peer]()

    class Leaving(Acting):
        def connect(self, address: str, **settings: Any) -> Peer:
            made.append(network.connect(address, **settings))
            peers.set_addresses({})
            return made[0]

    peers = peers_of(Leaving(print))
    with pytest.raises(TaskLost, match=f"{PS0} at memory:1 has left or moved while a connection to it was"):
        peers.get(PS0)
    assert made[0].closed


def test_after_close_nobody_is_missing_but_this_task_itself(network: MemoryNetwork) -> None:
    peers = peers_of(network)
    peers.close()
    for look in (peers.get, peers.connected):
        with pytest.raises(TaskLost, match="worker/task:0 has left the cluster, since close was called") as caught:
            look(PS0)
        assert f"at {__file__}:" in str(caught.value)
        assert "dflow.connect()" in str(caught.value)


@pytest.mark.parametrize("make", [MemoryNetwork, SocketTransport])
def test_a_task_that_is_dead_is_dialled_until_it_is_known_to_have_left(make: Callable[[], Transport]) -> None:
    dialling = threading.Event()
    transport = Acting(lambda _: dialling.set(), make())
    listener = transport.listen("" if make is MemoryNetwork else LOCAL_ADDRESS, name=PS0, handler=Recorder())
    listener.close()
    peers = peers_of(transport, listener.address, connect_timeout_s=1e6)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(peers.get, PS0) for _ in range(2)]
        assert dialling.wait(DEADLINE_S)
        peers.set_addresses({}, {PS0: "killed"})
        for each in waiting:
            with pytest.raises(TaskLost, match=f"{PS0} at .* has left or moved while .* was made: killed"):
                each.result(DEADLINE_S)
    with pytest.raises(TaskLost, match=f"{PS0} has left the cluster: killed"):
        peers.get(PS0)


def test_a_task_that_cannot_be_reached_for_all_the_time_there_is_counts_as_lost(network: MemoryNetwork) -> None:
    with pytest.raises(TaskLost, match=f"{PS0} at memory:1 could not be reached within 0.01 s: nothing listens there"):
        peers_of(network, connect_timeout_s=0.01).get(PS0)


def test_a_task_that_listens_and_does_not_answer_is_dialled_until_it_has_left() -> None:
    def leave(attempt: int) -> None:
        if attempt == 3:
            peers.set_addresses({}, {PS0: "no heartbeat"})

    transport = Acting(leave, SocketTransport())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peers = peers_of(transport, address, connect_timeout_s=0.05, reach_timeout_s=DEADLINE_S)
        with pytest.raises(TaskLost, match="has left or moved while a connection to it was made: no heartbeat"):
            peers.get(PS0)
    assert len(transport.attempts) == 3


def test_another_process_at_the_same_address_gets_another_connection(network: MemoryNetwork, ps: Listener) -> None:
    peers = peers_of(network)
    peers.set_addresses({PS0: ps.address}, {}, {PS0: "first"})
    first = peers.get(PS0)
    peers.set_addresses({PS0: ps.address}, {}, {PS0: "first"})
    assert peers.get(PS0) is first
    peers.set_addresses({PS0: ps.address}, {}, {PS0: "second"})
    assert first.closed == "the task has left or moved"
    assert peers.get(PS0) is not first
    peers.close()


@pytest.fixture
def accept(network: MemoryNetwork) -> Iterator[Callable[..., Peer]]:
    """Connect the ps to the worker; return the worker's end."""
    accepted = SimpleQueue[Peer]()
    listener = network.listen("", name=WORKER0, handler=Recorder(lambda peer, *_: accepted.put(peer)))

    def connect(handler: Recorder | None = None) -> Peer:
        opened = network.connect(
            listener.address, name=PS0, handler=handler or Recorder(), who="worker", timeout_s=DEADLINE_S
        )
        opened.start(Ok())  # type: ignore[arg-type]
        return accepted.get(timeout=DEADLINE_S)

    yield connect
    listener.close()


def test_a_task_introduces_itself_over_a_connection_that_it_takes_over(
    network: MemoryNetwork, accept: Callable[..., Peer]
) -> None:
    found = SimpleQueue[Message]()

    def answer(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        found.put(message)
        responder.reply(Ok())

    peers = peers_of(network)
    peers.introduce(Introduce(4, "process", 7))
    peers.adopt(accept(Recorder(answer)))
    assert found.get(timeout=DEADLINE_S) == Introduce(4, "process", 7)
    peers.introduce(Introduce(4, "process", 9))
    assert found.get(timeout=DEADLINE_S) == Introduce(4, "process", 9)
    peers.close()


def test_a_task_that_connects_again_is_answered_over_the_new_connection(
    network: MemoryNetwork, accept: Callable[..., Peer]
) -> None:
    peers, first, second = peers_of(network), accept(), accept()
    peers.adopt(first)
    peers.adopt(first)
    assert peers.get(PS0) is first
    assert not first.closed
    peers.adopt(second)  # where the task is, the first one has ended
    assert peers.get(PS0) is second
    assert first.closed
    peers.close()


def test_those_who_wait_for_a_task_share_the_attempt_and_have_an_error_each() -> None:
    may_end, errors = threading.Event(), SimpleQueue[Exception | None]()
    transport = Acting(lambda _: may_end.wait(DEADLINE_S))
    peers = peers_of(transport)
    assert peers.connected(PS0) is None
    for _ in range(3):
        peers.when_connected(PS0, errors.put)
    may_end.set()
    found = [errors.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [(type(error), str(error)) for error in found] == [(TaskLost, "no answer")] * 3
    assert len({id(error) for error in found}) == 3
    assert transport.attempts == [f"dflow dial {PS0}"]
    peers.when_connected(PS0, errors.put)
    assert isinstance(errors.get(timeout=DEADLINE_S), TaskLost)
    assert len(transport.attempts) == 2


def test_once_a_task_is_connected_its_connection_is_found(network: MemoryNetwork, ps: Listener) -> None:
    errors, peers = SimpleQueue[Exception | None](), peers_of(network)
    peers.when_connected(PS0, errors.put)
    assert errors.get(timeout=DEADLINE_S) is None
    peer = peers.connected(PS0)
    assert peer is not None
    assert peer is peers.get(PS0)
    peer.close("test")
    assert peers.connected(PS0) is None
    peers.close()


def test_without_a_thread_a_task_counts_as_lost(network: MemoryNetwork) -> None:
    errors, threads = list[Exception | None](), ThreadPoolExecutor(1)
    peers = peers_of(network, submit=threads.submit)
    threads.shutdown()
    peers.when_connected(PS0, errors.append)
    assert [*map(str, errors)] == [f"{PS0} cannot be connected: cannot schedule new futures after shutdown"]


def test_a_reader_thread_hands_over_its_connections_before_it_waits_for_an_attempt() -> None:
    may_end, waits = threading.Event(), SimpleQueue[None]()
    peers = peers_of(Acting(lambda _: may_end.wait(DEADLINE_S)))

    def get() -> None:
        before_waiting(lambda: waits.put(None))
        with pytest.raises(TaskLost, match="no answer"):
            peers.get(PS0)

    with ThreadPoolExecutor(2) as pool:
        getting = [pool.submit(get) for _ in range(2)]
        for _ in getting:
            waits.get(timeout=DEADLINE_S)
        may_end.set()
        for each in getting:
            each.result(DEADLINE_S)
