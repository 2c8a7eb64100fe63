"""Sessions: whatever happens to the links, each frame is handled once and in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dflow.distributed.transport.session import Session
from dflow.tracing.errors import WireError
from tests.effort import examples

ACK_FRAMES, ACK_BYTES = 4, 100


@dataclass(frozen=True)
class OnWire:
    """A frame between two ends; number 0 is an acknowledgement alone."""

    number: int
    acknowledged: int
    text: str
    size_bytes: int


@dataclass
class End:
    """A session, what it was given to send, what it handled and what it was told to release."""

    session: Session[tuple[int, str, int]] = field(
        default_factory=lambda: Session(ack_frames=ACK_FRAMES, ack_bytes=ACK_BYTES)
    )
    outbox: deque[OnWire] = field(default_factory=deque)
    said: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def say(self, text: str, size_bytes: int, *, linked: bool) -> None:
        self.said.append(text)
        number = self.session.send((len(self.said), text, size_bytes), size_bytes)
        assert number == len(self.said)
        if linked:
            self.outbox.append(OnWire(number, self.session.say_received(), text, size_bytes))

    def hear(self, frame: OnWire) -> None:
        self.released += [kept.item[1] for kept in self.session.acknowledge(frame.acknowledged)]
        if frame.number and self.session.receive(frame.number, frame.size_bytes):
            self.heard.append(frame.text)
        if self.session.ack_due:
            self.outbox.append(OnWire(0, self.session.say_received(), "", 0))

    def resume(self, peer_received: int) -> None:
        self.released += [kept.item[1] for kept in self.session.resume(peer_received)]
        for number, text, size_bytes in [kept.item for kept in self.session.retained]:
            self.outbox.append(OnWire(number, self.session.say_received(), text, size_bytes))


class TwoEnds(RuleBasedStateMachine):
    """Two ends over links that delay, repeat frames that came before, and break with any frames on the way."""

    ends = st.sampled_from([0, 1])

    @initialize()
    def start(self) -> None:
        self.both = [End(), End()]
        self.delivered: list[list[OnWire]] = [[], []]
        self.linked = True

    @rule(end=ends, size_bytes=st.integers(0, 150))
    def say(self, end: int, size_bytes: int) -> None:
        one = self.both[end]
        one.say(f"{end}:{len(one.said)}", size_bytes, linked=self.linked)

    @precondition(lambda self: self.linked)
    @rule(end=ends, count=st.integers(1, 5))
    def deliver(self, end: int, count: int) -> None:
        for _ in range(min(count, len(self.both[end].outbox))):
            frame = self.both[end].outbox.popleft()
            self.delivered[end].append(frame)
            self.both[1 - end].hear(frame)

    @precondition(lambda self: self.linked)
    @rule(end=ends, data=st.data())
    def repeat(self, end: int, data: st.DataObject) -> None:
        if self.delivered[end]:
            self.both[1 - end].hear(data.draw(st.sampled_from(self.delivered[end])))

    @precondition(lambda self: self.linked)
    @rule()
    def breaks(self) -> None:
        self.linked = False
        for end in self.both:
            end.outbox.clear()

    @precondition(lambda self: not self.linked)
    @rule()
    def link_again(self) -> None:
        self.linked = True
        received = [end.session.received for end in self.both]
        self.both[0].resume(received[1])
        self.both[1].resume(received[0])

    @invariant()
    def handled_once_and_in_order(self) -> None:
        for end, other in ((self.both[0], self.both[1]), (self.both[1], self.both[0])):
            assert other.heard == end.said[: len(other.heard)]
            assert other.session.received == len(other.heard)

    @invariant()
    def released_once_and_only_what_was_handled(self) -> None:
        for end, other in ((self.both[0], self.both[1]), (self.both[1], self.both[0])):
            assert end.released == end.said[: len(end.released)]
            assert len(end.released) <= len(other.heard)
            kept = len(end.said) - len(end.released)
            assert (end.session.retained_bytes == 0) or kept

    @invariant()
    def no_more_than_asked_is_left_unsaid(self) -> None:
        for end in self.both:
            assert not end.session.ack_due

    def teardown(self) -> None:
        """All that was said is heard once there is a link that stays."""
        if not hasattr(self, "both"):
            return
        if not self.linked:
            self.link_again()
        while any(end.outbox for end in self.both):
            for end in (0, 1):
                self.deliver(end, len(self.both[end].outbox))
        assert self.both[0].heard == self.both[1].said
        assert self.both[1].heard == self.both[0].said
        self.breaks()
        self.link_again()
        assert all(not end.session.retained_bytes and not end.outbox for end in self.both)
        assert all(end.released == end.said for end in self.both)


TwoEnds.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestTwoEnds = TwoEnds.TestCase


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda session: session.receive(2, 0), "frame 2 came after frame 0; those in between are missing"),
        (lambda session: session.acknowledge(2), "frame 2 is acknowledged, but only 1 were sent"),
        (
            lambda session: (session.acknowledge(1), session.resume(0)),
            "has 0 frames but had acknowledged 1; it has forgotten this session",
        ),
    ],
    ids=["gap", "not sent", "forgotten"],
)
def test_what_contradicts_earlier_frames_is_an_error(act: Callable[[Session[None]], object], text: str) -> None:
    session: Session[None] = Session()
    session.send(None, 0)
    with pytest.raises(WireError, match=text):
        act(session)


def test_the_end_gives_back_what_is_retained() -> None:
    session: Session[str] = Session()
    session.send("a", 10)
    session.send("b", 10)
    assert [kept.item for kept in session.end()] == ["a", "b"]
    assert session.retained_bytes == 0
    assert session.end() == []


@pytest.mark.parametrize(("frames", "size_bytes"), [(100, 10), (2, 100)])
def test_an_acknowledgement_is_due_after_many_bytes_or_frames(frames: int, size_bytes: int) -> None:
    session: Session[str] = Session(ack_frames=frames, ack_bytes=size_bytes)
    session.receive(1, 9)
    assert not session.ack_due
    session.receive(2, 1)
    assert session.ack_due
    assert session.say_received() == 2
    assert not session.ack_due
