"""One thread reads all connections, unless it has to wait for one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from dflow.distributed.transport.reactor import Reactor, give_way
from tests.distributed.transports import DEADLINE_S
from tests.distributed.waiting import until


class Reading:
    """A source that calls `on_data` with what it reads, and `remove`s itself at the end."""

    def __init__(self, reactor: Reactor, on_data: Callable[[bytes], None] = lambda data: None) -> None:
        self.far, self.near = socket.socketpair()
        self.reactor = reactor
        self.on_data = on_data
        self.threads: set[int] = set()
        self.seen: SimpleQueue[bytes | str] = SimpleQueue()
        self.is_in_frame = False
        reactor.add(self.near.fileno(), self.read, self.stalled)

    def read(self) -> bool:
        data = self.near.recv(100, socket.MSG_DONTWAIT)
        self.threads.add(threading.get_ident())
        if data:
            self.on_data(data)
        else:
            self.end()
        self.seen.put(data)
        return self.is_in_frame

    def stalled(self) -> None:
        self.end()
        self.seen.put("stalled")

    def end(self) -> None:
        self.reactor.remove(self.near.fileno())
        self.near.close()
        self.far.close()

    def tell(self, data: bytes) -> bytes | str:
        """Send from the far end, and see what comes of it."""
        self.far.sendall(data)
        return self.next()

    def next(self) -> bytes | str:
        return self.seen.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.far.shutdown(socket.SHUT_WR)
        assert self.next() == b""


def wait_for_no_thread(reactor: Reactor) -> None:
    for thread in threading.enumerate():
        if thread.name == "dflow read":
            thread.join(DEADLINE_S)
    assert reactor.threads == 0


def test_when_the_last_has_gone_nothing_is_left_and_a_next_one_is_read() -> None:
    reactor = Reactor(60.0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reading = Reading(reactor)
        assert reading.tell(b"hello") == b"hello"
        reading.close()
        wait_for_no_thread(reactor)
        assert len(os.listdir("/proc/self/fd")) == before


def test_while_one_is_waited_for_the_others_are_read() -> None:
    reactor = Reactor(60.0)
    waits, may_go_on = threading.Event(), threading.Event()

    def wait(data: bytes) -> None:
        if data == b"wait":
            give_way()
            waits.set()
            assert may_go_on.wait(DEADLINE_S)

    slow, quick = Reading(reactor, wait), Reading(reactor)
    slow.far.sendall(b"wait")
    assert waits.wait(DEADLINE_S)
    slow.far.sendall(b"later")
    for _ in range(3):
        assert quick.tell(b"hello") == b"hello"
    assert slow.seen.empty()
    may_go_on.set()
    assert [slow.next(), slow.next()] == [b"wait", b"later"]
    assert slow.tell(b"again") == b"again"
    slow.close()
    quick.close()
    wait_for_no_thread(reactor)


def test_all_connections_may_be_waited_for_at_once_and_few_threads_are_left() -> None:
    reactor = Reactor(60.0)
    together = threading.Barrier(8)

    def wait(data: bytes) -> None:
        give_way()
        together.wait(DEADLINE_S)

    readings = [Reading(reactor, wait) for _ in range(8)]
    for reading in readings:
        reading.far.sendall(b"x")
    assert [reading.next() for reading in readings] == [b"x"] * 8
    last = Reading(reactor)
    assert last.tell(b"hello") == b"hello"
    for reading in readings:
        reading.close()
    # Those that are too many go by themselves: all but the one that leads and the one that will.
    until(lambda: reactor.threads <= 2)
    assert last.tell(b"hello") == b"hello"
    last.close()
    wait_for_no_thread(reactor)


def test_a_connection_that_gave_way_may_be_the_last_to_go() -> None:
    reactor = Reactor(60.0)
    has_given_way, may_end = threading.Event(), threading.Event()

    def wait(data: bytes) -> None:
        give_way()
        has_given_way.set()
        assert may_end.wait(DEADLINE_S)
        last.end()

    last, other = Reading(reactor, wait), Reading(reactor)
    last.far.sendall(b"x")
    assert has_given_way.wait(DEADLINE_S)
    other.close()
    may_end.set()
    assert last.next() == b"x"
    wait_for_no_thread(reactor)


def test_a_frame_that_does_not_go_on_stalls_and_one_who_says_nothing_does_not() -> None:
    reactor = Reactor(0.05)
    idle, begun = Reading(reactor), Reading(reactor)

    def give_way_until_another_leads(data: bytes) -> None:
        give_way()
        assert idle.tell(b"hello") == b"hello"

    given_way = Reading(reactor, give_way_until_another_leads)
    begun.is_in_frame = given_way.is_in_frame = True
    assert begun.tell(b"half") == b"half"
    assert begun.next() == "stalled"
    # By now the thread that leads waits without end, and one that gave way finds the half frame.
    assert given_way.tell(b"half") == b"half"
    assert given_way.next() == "stalled"
    assert idle.tell(b"hello") == b"hello"
    assert idle.seen.empty()
    idle.close()
    wait_for_no_thread(reactor)


def test_a_connection_that_is_waited_for_does_not_stall_by_an_earlier_frame() -> None:
    reactor = Reactor(0.05)
    waits, may_go_on = threading.Event(), threading.Event()

    def go_on_and_wait(data: bytes) -> None:
        if data == b"half":
            slow.far.sendall(b"the rest, and a large one")
        else:
            slow.is_in_frame = False
            give_way()
            waits.set()
            assert may_go_on.wait(DEADLINE_S)

    slow, begun = Reading(reactor, go_on_and_wait), Reading(reactor)
    slow.is_in_frame = begun.is_in_frame = True
    assert slow.tell(b"half") == b"half"
    assert waits.wait(DEADLINE_S)
    assert begun.tell(b"half") == b"half"
    assert begun.next() == "stalled"
    assert slow.seen.empty()
    may_go_on.set()
    assert slow.next() == b"the rest, and a large one"
    slow.close()
    wait_for_no_thread(reactor)


def test_a_source_that_fails_takes_no_other_along(caplog: pytest.LogCaptureFixture) -> None:
    reactor = Reactor(60.0)

    def fail(data: bytes) -> None:
        raise ValueError("a fault of its own")

    faulty, sound = Reading(reactor, fail), Reading(reactor)
    faulty.far.sendall(b"x")
    for _ in range(3):
        assert sound.tell(b"hello") == b"hello"
    assert "a fault of its own" in caplog.text
    faulty.far.close()
    faulty.near.close()
    sound.close()
    wait_for_no_thread(reactor)
