from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.events import EventQueue


@given(seed=st.integers(0, 99), times=st.lists(st.sampled_from([0.0, 1.0, 2.0]), max_size=12))
def test_events_happen_in_order_of_time_and_the_same_way_for_the_same_seed(seed: int, times: list[float]) -> None:
    def happened() -> list[tuple[float, int]]:
        events, found = EventQueue(seed), list[tuple[float, int]]()
        for number, at_s in enumerate(times):
            events.at(at_s, lambda number=number: found.append((events.now_s, number)))  # type: ignore[misc]
        while events.step(9.0):
            pass
        assert events.now_s == 9.0
        return found

    first = happened()
    assert [at_s for at_s, _ in first] == sorted(times)
    assert [times[number] for _, number in first] == sorted(times)
    assert happened() == first


def test_the_seed_says_which_of_two_events_at_one_time_is_first() -> None:
    def first(seed: int) -> str:
        events, found = EventQueue(seed), list[str]()
        for name in "ab":
            events.at(1.0, lambda name=name: found.append(name))  # type: ignore[misc]
        events.step(1.0)
        return found[0]

    assert {first(seed) for seed in range(20)} == {"a", "b"}


def test_a_stopped_event_does_not_happen() -> None:
    events = EventQueue(0)
    found: list[str] = []
    events.after(1.0, lambda: found.append("stopped")).stop()
    events.after(2.0, lambda: found.append("other"))
    while events.step(5.0):
        pass
    assert found == ["other"]


def test_what_is_asked_for_in_the_past_happens_now() -> None:
    events = EventQueue(0)
    events.step(3.0)
    events.at(1.0, lambda: None)
    events.step(5.0)
    assert events.now_s == 3.0
