"""Who waits at the door, for any order of comings, goings and proofs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.security.admission import Admission
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
