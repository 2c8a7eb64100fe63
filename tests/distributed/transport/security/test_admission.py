"""Unauthenticated connections: which are admitted, and what is logged of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.security.admission import Admission
from dflow.distributed.transport.security.throttle import Throttle, on_one_line
from dflow.tracing.errors import TransportClosed
from tests.effort import examples

SOURCES = st.sampled_from(["a", "b", "c"])
EVENTS = st.lists(st.tuples(st.sampled_from(["arrive", "believe", "leave"]), SOURCES, st.integers(0, 30)), max_size=60)
LIMITS = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=examples(300))
@given(LIMITS, EVENTS)
def test_the_limits_hold_and_only_strangers_are_evicted(
    limits: tuple[int, int, int], events: list[tuple[str, str, int]]
) -> None:
    connections, strangers, per_source = limits
    admission: Admission[int] = Admission(connections=connections, unauthenticated=strangers, per_source=per_source)
    waiting: dict[int, str] = {}
    peers: set[int] = set()
    for number, (event, source, which) in enumerate(events):
        match event:
            case "arrive":
                if (evicted := admission.arrive(number, source)) is not None:
                    del waiting[evicted[0]]
                waiting[number] = source
            case "believe":
                if which not in waiting:
                    with pytest.raises(TransportClosed, match="evicted for another"):
                        admission.believe(which)
                elif admission.believe(which):
                    assert len(peers) < connections
                    del waiting[which]
                    peers.add(which)
                else:
                    assert len(peers) == connections
            case _:
                admission.leave(which)
                waiting.pop(which, None)
                peers.discard(which)
        assert (list(admission.unauthenticated), admission.peers) == (list(waiting), peers)
        assert len(waiting) <= strangers
        assert len(peers) <= connections
        assert all(list(waiting.values()).count(one) <= per_source for one in waiting.values())


def test_the_oldest_of_the_greediest_source_gives_way() -> None:
    admission: Admission[int] = Admission(connections=9, unauthenticated=4, per_source=3)
    for number, source in enumerate(["quiet", "greedy", "greedy", "greedy"]):
        assert admission.arrive(number, source) is None
    assert admission.arrive(4, "new") == (1, "4 connections were not authenticated yet")
    with pytest.raises(TransportClosed, match="evicted"):
        admission.believe(1)
    assert admission.believe(0)


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 5))
def test_no_period_says_more_than_its_burst_and_nothing_is_uncounted(waits: list[float], burst: int) -> None:
    now = [0.0]
    throttle = Throttle(burst, 2.0, clock=lambda: now[0])
    said: list[float] = []
    counted = 0
    for wait in waits:
        now[0] += wait
        text = throttle.ask()
        if text is not None:
            said.append(now[0])
            counted += 1 + (int(text.split()[0][1:]) if text else 0)
    # A period may begin in the middle of this window, hence twice the burst.
    assert all(sum(start <= one < start + 2.0 for one in said) <= 2 * burst for start in said)
    assert len(waits) - counted == throttle._unsaid


def test_lines_left_out_are_counted_with_the_next_one() -> None:
    now = [0.0]
    throttle = Throttle(1, 1.0, clock=lambda: now[0])
    assert [throttle.ask() for _ in range(3)] == ["", None, None]
    now[0] = 1.0
    assert throttle.ask() == " (2 more like it were not logged)"


@given(st.text(max_size=50))
def test_a_logged_text_is_one_line_that_can_be_printed(text: str) -> None:
    shown = on_one_line(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_a_long_text_is_cut() -> None:
    assert on_one_line("x" * 5000) == "x" * 1000 + " ... (4000 more characters)"
