"""The accumulator's decisions: dropped gradients, and the order of takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.queues.accumulator_machine import (
    AccumulatorCommand,
    AccumulatorEvent,
    AccumulatorMachine,
    Add,
    Drop,
    EnoughSet,
    Give,
    GradientApplied,
    StepSet,
    TakeAsked,
    TakeGivenUp,
    WarnOfStepBack,
)


def commands(*events: AccumulatorEvent) -> list[AccumulatorCommand]:
    """Return the commands of all events together."""
    state = AccumulatorMachine()
    return [command for event in events for command in state.handle(event)]


def test_a_take_is_served_by_the_gradient_that_completes_it_and_the_step_goes_on() -> None:
    state = AccumulatorMachine()
    assert state.handle(TakeAsked(7, 2)) == []
    assert state.handle(GradientApplied(0)) == [Add()]
    assert state.handle(GradientApplied(0)) == [Add(), Give(7, 2)]
    assert (state.step, state.count, state.dropped) == (1, 0, 0)


def test_a_take_gets_all_that_is_there() -> None:
    applied = [GradientApplied(0)] * 3
    assert commands(*applied, TakeAsked(1, 2))[3:] == [Give(1, 3)]


def test_a_gradient_of_an_earlier_step_is_dropped_and_counted_a_later_one_is_not() -> None:
    state = AccumulatorMachine()
    state.handle(StepSet(5))
    assert state.handle(GradientApplied(4)) == [Drop(4, 5)]
    assert state.handle(GradientApplied(5)) == [Add()]
    assert state.handle(GradientApplied(9)) == [Add()]
    assert (state.dropped, state.count) == (1, 2)


def test_a_gradient_beyond_the_limit_is_dropped_until_a_take_has_come() -> None:
    state = AccumulatorMachine(limit=2)
    done = [state.handle(GradientApplied(0)) for _ in range(3)]
    assert done == [[Add()], [Add()], [Drop(0, 0)]]
    assert state.handle(TakeAsked(1, 2)) == [Give(1, 2)]
    assert state.handle(GradientApplied(1)) == [Add()]
    assert (state.count, state.dropped) == (1, 1)


def test_a_take_that_waits_is_served_when_fewer_are_said_to_be_enough() -> None:
    state = AccumulatorMachine()
    waiting = [TakeAsked(1, 3), GradientApplied(0), GradientApplied(0)]
    assert [command for event in waiting for command in state.handle(event)] == [Add(), Add()]
    assert state.handle(EnoughSet(2)) == [Give(1, 2)]
    assert state.handle(TakeAsked(2, 3)) == []
    assert state.handle(EnoughSet(5)) == []
    assert [state.handle(GradientApplied(1)) for _ in range(3)] == [[Add()], [Add()], [Add(), Give(2, 3)]]


def test_takes_are_served_in_turn_though_a_later_one_wants_less() -> None:
    asked = [TakeAsked(1, 2), TakeAsked(2, 1)]
    assert commands(*asked, GradientApplied(0)) == [Add()]
    assert commands(*asked, *[GradientApplied(9)] * 3) == [Add(), Add(), Give(1, 2), Add(), Give(2, 1)]


def test_who_gives_up_no_longer_holds_up_the_others() -> None:
    assert commands(TakeAsked(1, 2), TakeAsked(2, 1), GradientApplied(0), TakeGivenUp(1))[-1:] == [Give(2, 1)]
    assert commands(TakeGivenUp(3)) == []


def test_setting_the_step_back_warns_and_does_it() -> None:
    assert commands(StepSet(4), StepSet(2), GradientApplied(2)) == [WarnOfStepBack(4, 2), Add()]


_events: st.SearchStrategy[list[AccumulatorEvent]] = st.lists(
    st.one_of(
        st.builds(GradientApplied, st.integers(0, 5)),
        st.builds(TakeAsked, st.integers(), st.integers(1, 3)),
        st.builds(StepSet, st.integers(0, 4)),
        st.builds(TakeGivenUp, st.integers(0, 3)),
    ),
    max_size=30,
    unique_by=lambda event: event.ticket if isinstance(event, TakeAsked) else object(),
)


@given(_events)
def test_every_gradient_is_dropped_or_given_once_and_no_take_gets_too_few(events: list[AccumulatorEvent]) -> None:
    state = AccumulatorMachine()
    wanted: dict[int, int] = {}
    added = dropped = given_out = 0
    for event in events:
        before = state.step
        done = state.handle(event)
        match event:
            case GradientApplied(step):
                assert (Drop(step, before) in done) is (step < before)
            case TakeAsked(ticket, count):
                wanted[ticket] = count
            case TakeGivenUp(ticket):
                wanted.pop(ticket, None)
            case StepSet(step):
                assert state.step == step
        added += done.count(Add())
        dropped += sum(isinstance(command, Drop) for command in done)
        for command in done:
            if isinstance(command, Give):
                assert command.ticket == next(iter(wanted))
                assert command.count >= wanted.pop(command.ticket)
                assert state.step == before + 1
                given_out += command.count
        assert state.count == added - given_out
        assert not wanted or state.count < next(iter(wanted.values()))
    assert state.dropped == dropped
