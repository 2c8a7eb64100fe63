"""Queues as a state machine beside the sequential model: equal elements in equal order, and an end of every wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.queues.queue_machine import (
    CloseAsked,
    DequeueAsked,
    EnqueueAsked,
    Fail,
    QueueCommand,
    QueueEvent,
    QueueMachine,
    Serve,
    WaitEnded,
    Why,
)
from dflow.lowering.queues.queues import order_of
from dflow.tracing.errors import DeadlineExceeded, QueueClosed
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from tests.effort import examples
from tests.reference.queue_model import QueueModel

FIFO = QueueSettings(QueueKind.FIFO, 3)


def machine(settings: QueueSettings = FIFO) -> QueueMachine:
    """A new queue."""
    return QueueMachine(settings.capacity, order_of(settings))


def elements(*numbers: int) -> tuple[Any, ...]:
    """Elements whose only component is a number."""
    return tuple((number,) for number in numbers)


def run(queue: QueueMachine, *events: QueueEvent) -> list[QueueCommand]:
    """Return all commands of the events."""
    return [command for event in events for command in queue.handle(event)]


def test_an_enqueue_waits_for_room_and_a_dequeue_makes_it() -> None:
    queue = machine()
    assert run(queue, EnqueueAsked(0, elements(1, 2, 3)), EnqueueAsked(1, elements(4))) == [Serve(0)]
    assert run(queue, DequeueAsked(2, 1)) == [Serve(2, elements(1)), Serve(1)]


def test_a_dequeue_of_several_takes_them_at_once_and_holds_up_those_behind_it() -> None:
    queue = machine()
    assert run(queue, DequeueAsked(0, 2), DequeueAsked(1, 1), EnqueueAsked(2, elements(1))) == [Serve(2)]
    assert run(queue, EnqueueAsked(3, elements(2, 3))) == [Serve(3), Serve(0, elements(1, 2)), Serve(1, elements(3))]


def test_a_dequeue_of_more_than_the_capacity_is_served() -> None:
    queue = machine()
    asked = run(queue, EnqueueAsked(0, elements(1, 2, 3, 4)), DequeueAsked(1, 5), EnqueueAsked(2, elements(5, 6)))
    assert asked == [Serve(0), Serve(1, elements(1, 2, 3, 4, 5)), Serve(2)]


def test_a_close_lets_in_what_waits_and_then_fails_what_cannot_be_served() -> None:
    queue = machine()
    run(queue, EnqueueAsked(0, elements(1, 2, 3)), EnqueueAsked(1, elements(4, 5)), CloseAsked())
    assert run(queue, EnqueueAsked(2, elements(6))) == [Fail(2, Why.CLOSED)]
    assert run(queue, DequeueAsked(3, 2)) == [Serve(3, elements(1, 2)), Serve(1)]
    assert run(queue, DequeueAsked(4, 4), DequeueAsked(5, 4, or_fewer=True)) == [
        Fail(4, Why.CLOSED),
        Serve(5, elements(3, 4, 5)),
    ]
    assert run(queue, DequeueAsked(6, 4, or_fewer=True), DequeueAsked(7, 0)) == [Fail(6, Why.CLOSED), Serve(7)]


def test_a_close_may_cancel_what_waits_to_come_in() -> None:
    queue = machine()
    run(queue, EnqueueAsked(0, elements(1, 2, 3)), EnqueueAsked(1, elements(4)))
    assert run(queue, CloseAsked(cancel_pending=True)) == [Fail(1, Why.CLOSED)]
    assert run(queue, DequeueAsked(2, 3), DequeueAsked(3, 1)) == [Serve(2, elements(1, 2, 3)), Fail(3, Why.CLOSED)]


def test_a_close_wakes_every_dequeue_that_waits() -> None:
    queue = machine()
    run(queue, DequeueAsked(0, 2), DequeueAsked(1, 1), EnqueueAsked(2, elements(1)))
    assert run(queue, CloseAsked()) == [Fail(0, Why.CLOSED), Serve(1, elements(1))]


def test_a_wait_that_ends_frees_the_way_for_those_behind_it() -> None:
    queue = machine()
    run(queue, DequeueAsked(0, 2), DequeueAsked(1, 1), EnqueueAsked(2, elements(1)))
    assert run(queue, WaitEnded(0)) == [Fail(0, Why.ENDED), Serve(1, elements(1))]
    assert run(queue, WaitEnded(0), WaitEnded(9)) == []


def test_a_shuffling_queue_holds_elements_back_until_it_is_closed() -> None:
    queue = machine(QueueSettings(QueueKind.SHUFFLE, 4, min_after_dequeue=2, seed=1))
    run(queue, EnqueueAsked(0, elements(1, 2, 3)))
    first, *rest = run(queue, DequeueAsked(1, 1), DequeueAsked(2, 1))
    assert isinstance(first, Serve)
    assert rest == []
    (second,) = run(queue, CloseAsked())
    assert isinstance(second, Serve)
    assert len({*first.elements, *second.elements}) == 2


def test_the_seed_says_the_order() -> None:
    def order(seed: int) -> list[QueueCommand]:
        asked = EnqueueAsked(0, elements(*range(8)))
        return run(machine(QueueSettings(QueueKind.SHUFFLE, 8, seed=seed)), asked, DequeueAsked(1, 8))

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_priorities_go_lowest_first_and_equal_ones_in_order() -> None:
    queue = machine(QueueSettings(QueueKind.PRIORITY, 4))
    run(queue, EnqueueAsked(0, ((2, "a"), (1, "b"), (2, "c"), (-3, "d"))))
    assert run(queue, DequeueAsked(1, 4)) == [Serve(1, ((-3, "d"), (1, "b"), (2, "a"), (2, "c")))]


_KINDS = st.builds(
    QueueSettings, st.sampled_from(QueueKind), st.integers(2, 4), st.integers(0, 2), st.integers(0, 3)
).map(lambda s: s if s.kind is QueueKind.SHUFFLE else QueueSettings(s.kind, s.capacity))
_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enqueue"), st.integers(0, 3)),
        st.tuples(st.just("dequeue"), st.integers(0, 6)),
        st.tuples(st.just("up_to"), st.integers(0, 6)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.sampled_from(["close", "cancel", "nothing", "nothing", "nothing"]), st.just(0)),
    ),
    max_size=24,
)


def event_of(action: str, argument: int, ticket: int, serials: Any) -> QueueEvent | None:
    """The event of a test's action; elements are numbered to distinguish them."""
    match action:
        case "enqueue":
            return EnqueueAsked(ticket, tuple((next(serials) * 7 % 5, next(serials)) for _ in range(argument)))
        case "dequeue" | "up_to":
            return DequeueAsked(ticket, argument, action == "up_to")
        case "end":
            return WaitEnded(ticket - 1 - argument)
        case "close" | "cancel":
            return CloseAsked(action == "cancel")
    return None


@settings(max_examples=examples(300))
@given(kind=_KINDS, actions=_ACTIONS)
def test_no_element_is_lost_or_given_twice_and_every_wait_ends_once(kind: QueueSettings, actions: Any) -> None:
    queue, serials = machine(kind), iter(range(1000))
    events = [event_of(*action, ticket, serials) for ticket, action in enumerate(actions)]
    asked = {event.ticket: event for event in events if isinstance(event, (EnqueueAsked, DequeueAsked))}
    # At the end no op may wait: a close ends every dequeue, after the enqueues are cancelled.
    ending: list[QueueEvent] = [CloseAsked(cancel_pending=True)]
    commands = run(queue, *(event for event in events if event is not None), *ending)
    assert sorted(command.ticket for command in commands) == sorted(asked)
    given = [element for command in commands if isinstance(command, Serve) for element in command.elements]
    left = queue.order.contents()
    served = {command.ticket for command in commands if isinstance(command, Serve)}
    brought = [e for event in asked.values() if isinstance(event, EnqueueAsked) for e in event.elements]
    whole = [e for t, event in asked.items() if isinstance(event, EnqueueAsked) and t in served for e in event.elements]
    assert len({*given, *left}) == len(given) + len(left)
    assert {*whole} <= {*given, *left} <= {*brought}
    if kind.kind is QueueKind.FIFO:
        assert [*given, *left] == [element for element in brought if element in {*given, *left}]
    for command in commands:
        event = asked[command.ticket]
        if isinstance(command, Serve) and isinstance(event, DequeueAsked):
            assert len(command.elements) == event.count or (event.or_fewer and 0 < len(command.elements) < event.count)


@settings(max_examples=examples(300))
@given(kind=_KINDS, actions=_ACTIONS)
def test_asked_one_at_a_time_it_does_what_the_model_does(kind: QueueSettings, actions: Any) -> None:
    queue, model, serials = machine(kind), QueueModel(kind), iter(range(1000))
    for ticket, action in enumerate(actions):
        event = event_of(*action, ticket, serials)
        if event is None or isinstance(event, WaitEnded):
            continue
        if isinstance(event, CloseAsked):
            model.is_closed = True
            assert run(queue, event) == []
            continue
        try:
            if isinstance(event, EnqueueAsked):
                model.enqueue(event.elements)
                wanted: QueueCommand | None = Serve(ticket)
            else:
                wanted = Serve(ticket, tuple(model.dequeue(event.count, event.or_fewer)))
        except QueueClosed:
            wanted = Fail(ticket, Why.CLOSED)
        except DeadlineExceeded:
            return  # the op waits, and the next ones depend on others
        assert run(queue, event) == [wanted]
        assert sorted(queue.order.contents()) == sorted(model.elements)


@pytest.mark.parametrize("kind", QueueKind)
def test_more_elements_come_in_order_through_a_queue_of_one(kind: QueueKind) -> None:
    queue = machine(QueueSettings(kind, 1))
    given = run(queue, EnqueueAsked(0, elements(1, 2, 3)), *(DequeueAsked(ticket, 1) for ticket in (1, 2, 3)))
    assert given == [Serve(1, elements(1)), Serve(2, elements(2)), Serve(0), Serve(3, elements(3))]
