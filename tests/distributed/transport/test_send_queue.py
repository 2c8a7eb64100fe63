"""Frames leave whole and in order, and those that a reader thread gathers leave together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest

from dflow.distributed.transport.link import Frame, Kind, Limits, become_reader
from dflow.distributed.transport.reactor import give_way
from dflow.distributed.transport.send_queue import GATHERED_BYTES, SendQueue, flush, gather
from dflow.distributed.transport.stream import Parts
from tests.distributed.transports import DEADLINE_S


class Paper:
    """A stream that notes what is sent, and what without waiting by `calls`, of at most `room` bytes each."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.calls: list[bytes] = []
        self.sent: SimpleQueue[bytes] = SimpleQueue()

    def send(self, parts: Sequence[memoryview], *, waits: bool = True) -> int:
        data = b"".join(parts)
        if not waits:
            data = data[: self.room]
            self.calls.append(data)
        self.sent.put(data)
        return len(data)


def pack(frames: Sequence[Frame]) -> Parts:
    """The meta and payload of each frame."""
    return [memoryview(part) for frame in frames for part in (frame.meta, frame.payload)]


def frame(text: str, payload: bytes = b"") -> Frame:
    return Frame(Kind.NOTIFY, 0, text.encode(), payload)


@pytest.fixture
def paper() -> Paper:
    return Paper()


@pytest.fixture
def queue(paper: Paper) -> SendQueue:
    return SendQueue(paper, Limits(), pack)  # type: ignore[arg-type]


@pytest.fixture
def as_reader() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Runs a function on a thread that reads connections."""
    failed: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        def reads() -> None:
            become_reader()
            gather()
            try:
                work()
            except BaseException as error:
                failed.append(error)
            flush()

        thread = threading.Thread(target=reads)
        thread.start()
        thread.join(DEADLINE_S)

    yield run
    assert not failed


AsReader = Callable[[Callable[[], None]], None]


def test_gathered_frames_leave_before_the_thread_waits(queue: SendQueue, paper: Paper, as_reader: AsReader) -> None:
    def work() -> None:
        queue.send(frame("a"))
        give_way()
        assert paper.calls == [b"a"]
        queue.send(frame("b"))

    as_reader(work)
    assert paper.calls == [b"a", b"b"]


def test_a_large_frame_takes_along_what_was_gathered(queue: SendQueue, paper: Paper, as_reader: AsReader) -> None:
    large = bytes(GATHERED_BYTES + 1)

    def work() -> None:
        queue.send(frame("a"))
        queue.send(frame("b", large))
        assert paper.calls == [b"ab" + large]
        queue.send(frame("c"))

    as_reader(work)
    assert paper.calls == [b"ab" + large, b"c"]


def test_a_frame_of_another_thread_takes_along_what_was_gathered(
    queue: SendQueue, paper: Paper, as_reader: AsReader
) -> None:
    def work() -> None:
        queue.send(frame("a"))
        other = threading.Thread(target=queue.send, args=(frame("b"),))
        other.start()
        other.join(DEADLINE_S)
        assert paper.sent.get(timeout=DEADLINE_S) == b"ab"

    as_reader(work)
    assert paper.calls == []


def test_no_more_is_gathered_than_the_queue_may_hold(queue: SendQueue, paper: Paper, as_reader: AsReader) -> None:
    texts = [f"{number:03}" for number in range(200)]

    def work() -> None:
        for text in texts:
            queue.send(frame(text))
        assert len(paper.calls) == 3

    as_reader(work)
    assert b"".join(paper.calls) == "".join(texts).encode()


def test_frames_that_do_not_go_at_once_are_sent_in_order_by_another_thread(
    queue: SendQueue, paper: Paper, as_reader: AsReader
) -> None:
    paper.room = 4

    def work() -> None:
        for text in ("first ", "second "):
            queue.send(frame(text))
        flush()
        for text in ("third ", "fourth"):
            queue.send(frame(text))

    as_reader(work)
    sent = b""
    while len(sent) < len(b"first second third fourth"):
        sent += paper.sent.get(timeout=DEADLINE_S)
    assert sent == b"first second third fourth"


def test_a_queued_frame_leaves_first_also_while_a_drain_thread_is_about_to_send_it(
    queue: SendQueue, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[Parts] = []
    monkeypatch.setattr(queue, "_start_drain", drains.append)
    queue.send_with_next(frame("begin"))
    with queue._sending:  # another thread sends
        queue.flush()
    assert drains == [[]]
    queue.send(frame("release"))
    assert paper.sent.get(timeout=DEADLINE_S) == b"beginrelease"
    queue._drain([])
    queue.send_with_next(frame("later"))
    queue.flush()
    assert paper.sent.get(timeout=DEADLINE_S) == b"later"
