from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from dflow.distributed.steps.peers import Peers
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Peer, Responder, Transport
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.basic import Introduce, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.lowering.values.computed import before_waiting
from dflow.tracing.errors import DeadlineExceeded, TaskLost
from tests.distributed.transports import DEADLINE_S, Recorder

PS0 = "/job:ps/task:0"


def test_whoever_answers_at_a_tasks_address_is_that_task_or_not_spoken_to() -> None:
    network, other = MemoryNetwork(), Recorder()
    listener = network.listen("", name="/job:ps/task:1", handler=other)
    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({"/job:ps/task:0": listener.address, "/job:ps/task:1": listener.address})
    with pytest.raises(TaskLost, match="/job:ps/task:0 is not at memory:1 any more, where /job:ps/task:1 answers"):
        peers.get("/job:ps/task:0")
    assert other.closed.get(timeout=DEADLINE_S)
    assert peers.get("/job:ps/task:1").name == "/job:ps/task:1"
    peers.close()
    listener.close()


def test_a_connection_to_a_task_that_leaves_while_it_is_made_is_not_kept() -> None:
    network, other, made = MemoryNetwork(), Recorder(), list[Peer]()
    listener = network.listen("", name=PS0, handler=other)

    class Leaving:
        listen = staticmethod(network.listen)

        def connect(self, address: str, **settings: Any) -> Peer:
            made.append(network.connect(address, **settings))
            peers.set_addresses({})
            return made[-1]

    peers = Peers(Leaving(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: listener.address})
    with pytest.raises(TaskLost, match="/job:ps/task:0 at memory:1 has left or moved while a connection to it was"):
        peers.get(PS0)
    assert made[0].closed
    listener.close()


def test_after_close_nobody_is_missing_but_this_task_itself() -> None:
    peers = Peers(MemoryNetwork(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "memory:1"})
    peers.close()
    with pytest.raises(TaskLost, match="worker/task:0 has left the cluster, since close was called") as caught:
        peers.get(PS0)
    assert f"at {__file__}:" in str(caught.value)
    assert "dflow.connect()" in str(caught.value)


@pytest.mark.parametrize("make", [MemoryNetwork, SocketTransport])
def test_a_task_that_is_dead_is_dialled_until_it_is_known_to_have_left(make: Callable[[], Transport]) -> None:
    transport, dialling = make(), threading.Event()
    listener = transport.listen("" if make is MemoryNetwork else LOCAL_ADDRESS, name=PS0, handler=Recorder())
    address = listener.address
    listener.close()

    class Watched:
        listen = staticmethod(transport.listen)

        def connect(self, address: str, **settings: Any) -> Peer:
            dialling.set()
            return transport.connect(address, **settings)

    peers = Peers(Watched(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=1e6)
    peers.set_addresses({PS0: address})
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(peers.get, PS0) for _ in range(2)]
        assert dialling.wait(DEADLINE_S)
        peers.set_addresses({}, {PS0: "killed"})
        for each in waiting:
            with pytest.raises(TaskLost, match=r"/job:ps/task:0 at .* has left or moved while .* was made: killed"):
                each.result(DEADLINE_S)
    with pytest.raises(TaskLost, match="/job:ps/task:0 has left the cluster: killed"):
        peers.get(PS0)


def test_a_task_that_cannot_be_reached_for_all_the_time_there_is_counts_as_lost() -> None:
    peers = Peers(MemoryNetwork(), name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=0.01)
    peers.set_addresses({PS0: "memory:1"})
    with pytest.raises(TaskLost, match=f"{PS0} at memory:1 could not be reached within 0.01 s: nothing listens there"):
        peers.get(PS0)


def test_a_task_that_listens_and_does_not_answer_is_dialled_until_it_has_left() -> None:
    attempts = list[str]()

    class Counting(SocketTransport):
        def connect(self, address: str, **settings: Any) -> Peer:
            attempts.append(address)
            if len(attempts) == 3:
                peers.set_addresses({}, {PS0: "no heartbeat"})
            return super().connect(address, **settings)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        peers = Peers(
            Counting(),
            name="/job:worker/task:0",
            handler=Recorder(),
            connect_timeout_s=0.05,
            reach_timeout_s=DEADLINE_S,
        )
        peers.set_addresses({PS0: f"127.0.0.1:{silent.getsockname()[1]}"})
        with pytest.raises(TaskLost, match="has left or moved while a connection to it was made: no heartbeat"):
            peers.get(PS0)
    assert len(attempts) == 3


def test_another_process_at_the_same_address_gets_another_connection() -> None:
    network, server = MemoryNetwork(), Recorder()
    listener = network.listen("", name=PS0, handler=server)
    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: listener.address}, {}, {PS0: "first"})
    first = peers.get(PS0)
    peers.set_addresses({PS0: listener.address}, {}, {PS0: "first"})
    assert peers.get(PS0) is first
    peers.set_addresses({PS0: listener.address}, {}, {PS0: "second"})
    assert first.closed == "the task has left or moved"
    assert peers.get(PS0) is not first
    peers.close()
    listener.close()


def test_a_task_introduces_itself_over_a_connection_that_it_takes_over() -> None:
    network, found = MemoryNetwork(), SimpleQueue[Message]()

    def answer(peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        found.put(message)
        responder.reply(Ok())

    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "nowhere"})
    peers.introduce(Introduce(4, "process", 7))
    accepted = SimpleQueue[Peer]()
    listener = network.listen("", name="/job:worker/task:0", handler=Recorder(lambda peer, *rest: accepted.put(peer)))
    network.connect(listener.address, name=PS0, handler=Recorder(answer), who="worker", timeout_s=1.0).start(Ok())  # type: ignore[arg-type]
    peers.adopt(accepted.get(timeout=DEADLINE_S))
    assert found.get(timeout=DEADLINE_S) == Introduce(4, "process", 7)
    peers.introduce(Introduce(4, "process", 9))
    assert found.get(timeout=DEADLINE_S) == Introduce(4, "process", 9)
    peers.close()
    listener.close()


def test_a_task_that_connects_again_is_answered_over_the_new_connection() -> None:
    network, accepted = MemoryNetwork(), SimpleQueue[Peer]()
    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "nowhere"})
    listener = network.listen("", name="/job:worker/task:0", handler=Recorder(lambda peer, *rest: accepted.put(peer)))

    def connect() -> Peer:
        opened = network.connect(listener.address, name=PS0, handler=Recorder(), who="worker", timeout_s=1.0)
        opened.start(Ok())  # type: ignore[arg-type]
        return accepted.get(timeout=DEADLINE_S)

    first, second = connect(), connect()
    peers.adopt(first)
    peers.adopt(first)
    assert peers.get(PS0) is first
    assert not first.closed
    peers.adopt(second)  # where the task is, the first one has ended
    assert peers.get(PS0) is second
    assert first.closed
    peers.close()
    listener.close()


class Refusing:
    """A transport that fails attempts to connect, when they may end."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.listen = self.network.listen
        self.attempts, self.may_end = list[str](), threading.Event()

    def connect(self, address: str, **settings: Any) -> Peer:
        self.attempts.append(threading.current_thread().name)
        assert self.may_end.wait(DEADLINE_S)
        raise DeadlineExceeded("no answer")


def test_those_who_wait_for_a_task_share_the_attempt_and_have_an_error_each() -> None:
    transport, errors = Refusing(), SimpleQueue[Exception | None]()
    peers = Peers(transport, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "memory:1"})
    assert peers.connected(PS0) is None
    for _ in range(3):
        peers.when_connected(PS0, errors.put)
    transport.may_end.set()
    found = [errors.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [(type(error), str(error)) for error in found] == [(TaskLost, "no answer")] * 3
    assert len({id(error) for error in found}) == 3
    assert transport.attempts == [f"dflow dial {PS0}"]
    peers.when_connected(PS0, errors.put)
    assert isinstance(errors.get(timeout=DEADLINE_S), TaskLost)
    assert len(transport.attempts) == 2


def test_once_a_task_is_connected_its_connection_is_found() -> None:
    network, errors = MemoryNetwork(), SimpleQueue[Exception | None]()
    listener = network.listen("", name=PS0, handler=Recorder())
    peers = Peers(network, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: listener.address})
    peers.when_connected(PS0, errors.put)
    assert errors.get(timeout=DEADLINE_S) is None
    peer = peers.connected(PS0)
    assert peer is not None
    assert peer is peers.get(PS0)
    peer.close("test")
    assert peers.connected(PS0) is None
    peers.close()
    with pytest.raises(TaskLost, match="worker/task:0 has left the cluster, since close was called"):
        peers.connected(PS0)
    listener.close()


def test_without_a_thread_a_task_counts_as_lost() -> None:
    errors = list[Exception | None]()
    threads = ThreadPoolExecutor(1)
    peers = Peers(
        MemoryNetwork(),
        name="/job:worker/task:0",
        handler=Recorder(),
        connect_timeout_s=DEADLINE_S,
        submit=threads.submit,
    )
    peers.set_addresses({PS0: "memory:1"})
    threads.shutdown()
    peers.when_connected(PS0, errors.append)
    assert [str(error) for error in errors] == [
        f"{PS0} cannot be connected: cannot schedule new futures after shutdown"
    ]


def test_a_reader_thread_hands_over_its_connections_before_it_waits_for_an_attempt() -> None:
    transport, waits = Refusing(), SimpleQueue[None]()
    peers = Peers(transport, name="/job:worker/task:0", handler=Recorder(), connect_timeout_s=DEADLINE_S)
    peers.set_addresses({PS0: "memory:1"})

    def get() -> None:
        before_waiting(lambda: waits.put(None))
        with pytest.raises(TaskLost, match="no answer"):
            peers.get(PS0)

    with ThreadPoolExecutor(2) as pool:
        getting = [pool.submit(get) for _ in range(2)]
        for _ in getting:
            waits.get(timeout=DEADLINE_S)
        transport.may_end.set()
        for each in getting:
            each.result(DEADLINE_S)
