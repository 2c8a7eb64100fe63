"""The accumulator's decisions: dropped gradients, and the order of takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.queues.accumulator_machine import AccumulatorMachine


def test_a_gradient_beyond_the_limit_is_dropped_until_a_take_has_come() -> None:
    state = AccumulatorMachine(limit=2)
    for _ in range(3):
        state.apply(0)
    assert (state.count, state.dropped) == (2, 1)
    assert state.take(1, 2) == [(1, 2)]
    assert state.apply(1) == []
    assert (state.count, state.dropped) == (1, 1)


def test_a_take_that_waits_is_served_when_fewer_are_said_to_be_enough() -> None:
    state = AccumulatorMachine()
    assert state.take(1, 3) == state.apply(0) == state.apply(0) == []
    assert state.set_enough(2) == [(1, 2)]
    assert state.take(2, 3) == state.set_enough(5) == []
    assert [state.apply(1) for _ in range(3)] == [[], [], [(2, 3)]]


_calls = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.integers(0, 5)),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("set_step"), st.integers(0, 4)),
        st.tuples(st.just("abandon"), st.integers(0, 30)),
    ),
    max_size=30,
)


@given(_calls)
def test_every_gradient_is_dropped_or_given_once_and_no_take_gets_too_few(calls: list[tuple[str, int]]) -> None:
    state = AccumulatorMachine()
    wanted: dict[int, int] = {}
    added = dropped = given_out = 0
    for ticket, (call, number) in enumerate(calls):
        before, done = state.step, list[tuple[int, int]]()
        match call:
            case "apply":
                dropped, added = dropped + (number < before), added + (number >= before)
                done = state.apply(number)
            case "take":
                wanted[ticket] = number
                done = state.take(ticket, number)
            case "abandon":
                wanted.pop(number, None)
                done = state.abandon(number)
            case "set_step":
                assert state.set_step(number) == before
                assert state.step == number
        for served, count in done:
            assert served == next(iter(wanted))
            assert count >= wanted.pop(served)
            assert state.step == before + 1
            given_out += count
        assert (state.count, state.dropped) == (added - given_out, dropped)
        assert not wanted or state.count < next(iter(wanted.values()))


_kept_calls = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.integers(0, 4)),
        st.tuples(st.just("take_kept"), st.integers(1, 3)),
        st.tuples(st.just("set_step"), st.integers(0, 4)),
    ),
    max_size=30,
)


@given(_kept_calls)
def test_every_kept_gradient_is_dropped_or_taken_once(calls: list[tuple[str, int]]) -> None:
    state, given_out, taken = AccumulatorMachine(), 0, 0
    for call, number in calls:
        before, there = state.step, dict(state.kept)
        match call:
            case "keep":
                ticket, given_out = state.keep(number), given_out + 1
                assert (ticket == 0) == (number < before)
                assert ticket not in there
                assert state.step == max(before, number)
            case "take_kept" if there:
                chosen = [*there][:number]
                state.take_kept(chosen)
                taken += len(chosen)
                assert state.step > max(there[ticket] for ticket in chosen)
                assert {*state.kept}.isdisjoint(chosen)
            case "set_step":
                state.set_step(number)
        if state.kept != there:
            assert min(state.kept.values(), default=state.step) >= state.step
        assert given_out == len(state.kept) + taken + state.dropped
