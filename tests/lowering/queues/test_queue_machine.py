"""Queues as a state machine beside the sequential model: equal elements in equal order, and an end of every wait."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.queues.queue_machine import Fail, QueueCommand, QueueMachine, Serve
from dflow.lowering.queues.queues import order_of
from dflow.tracing.errors import DeadlineExceeded, QueueClosed
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import FedElement
from tests.effort import examples
from tests.reference.queue_model import QueueModel

FIFO = QueueSettings(QueueKind.FIFO, 3)


def machine(settings: QueueSettings = FIFO) -> QueueMachine:
    """A new queue."""
    return QueueMachine(settings.capacity, order_of(settings))


def elements(*numbers: int) -> tuple[Any, ...]:
    """Elements whose only component is a number."""
    return tuple((number,) for number in numbers)


def test_a_dequeue_of_several_takes_them_at_once_and_holds_up_those_behind_it() -> None:
    queue = machine()
    assert queue.dequeue(0, 2) + queue.dequeue(1, 1) + queue.enqueue(2, elements(1)) == [Serve(2)]
    assert queue.enqueue(3, elements(2, 3)) == [Serve(3), Serve(0, elements(1, 2)), Serve(1, elements(3))]


def test_a_dequeue_of_more_than_the_capacity_is_served() -> None:
    queue = machine()
    asked = queue.enqueue(0, elements(1, 2, 3, 4)) + queue.dequeue(1, 5) + queue.enqueue(2, elements(5, 6))
    assert asked == [Serve(0), Serve(1, elements(1, 2, 3, 4, 5)), Serve(2)]


def test_a_close_lets_in_what_waits_and_then_fails_what_cannot_be_served() -> None:
    queue = machine()
    assert queue.enqueue(0, elements(1, 2, 3)) + queue.enqueue(1, elements(4, 5)) + queue.close() == [Serve(0)]
    assert queue.enqueue(2, elements(6)) == [Fail(2)]
    assert queue.dequeue(3, 2) == [Serve(3, elements(1, 2)), Serve(1)]
    assert queue.dequeue(4, 4) + queue.dequeue(5, 4, or_fewer=True) == [Fail(4), Serve(5, elements(3, 4, 5))]
    assert queue.dequeue(6, 4, or_fewer=True) + queue.dequeue(7, 0) == [Fail(6), Serve(7)]


def test_an_element_of_a_feed_is_put_in_once() -> None:
    queue = machine()
    first, fourth = FedElement("feed", 0), FedElement("feed", 3)
    assert queue.enqueue(0, elements(1), first) + queue.enqueue(1, elements(1), first) == [Serve(0), Serve(1)]
    assert queue.enqueue(2, elements(2, 3)) + queue.enqueue(3, elements(4), fourth) == [Serve(2)]
    # It is pending, and given again: one of the two goes in.
    assert queue.enqueue(4, elements(4), fourth) == []
    assert queue.dequeue(5, 1) == [Serve(5, elements(1)), Serve(3), Serve(4)]
    assert queue.enqueue(6, elements(1), first) + queue.enqueue(7, elements(1), FedElement("other", 0)) == [Serve(6)]
    assert queue.dequeue(8, 3) == [Serve(8, elements(2, 3, 4)), Serve(7)]


def test_an_element_of_a_feed_that_was_abandoned_is_not_counted_as_in() -> None:
    queue = machine()
    assert queue.enqueue(0, elements(1, 2, 3)) + queue.enqueue(1, elements(4), FedElement("feed", 0)) == [Serve(0)]
    assert queue.abandon(1) + queue.dequeue(2, 1) == [Serve(2, elements(1))]
    assert queue.enqueue(3, elements(4), FedElement("feed", 0)) == [Serve(3)]
    assert queue.dequeue(4, 3) == [Serve(4, elements(2, 3, 4))]


def test_a_wait_that_ends_frees_the_way_for_those_behind_it() -> None:
    queue = machine()
    assert queue.dequeue(0, 2) + queue.dequeue(1, 1) + queue.enqueue(2, elements(1)) == [Serve(2)]
    assert queue.abandon(0) == [Serve(1, elements(1))]
    assert queue.abandon(0) + queue.abandon(9) == []


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


def act(queue: QueueMachine, action: str, argument: Any, ticket: int) -> list[QueueCommand]:
    """Do a test's action on a queue."""
    match action:
        case "enqueue":
            return queue.enqueue(ticket, argument)
        case "dequeue" | "up_to":
            return queue.dequeue(ticket, argument, action == "up_to")
        case "end":
            return queue.abandon(ticket - 1 - argument)
        case "close" | "cancel":
            return queue.close(action == "cancel")
    return []


def numbered(actions: Any) -> list[tuple[str, Any]]:
    """The actions with elements for the enqueues, which are numbered to distinguish them."""
    serials = iter(range(1000))
    return [
        (action, tuple((next(serials) * 7 % 5, next(serials)) for _ in range(count)) if action == "enqueue" else count)
        for action, count in actions
    ]


@settings(max_examples=examples(300))
@given(kind=_KINDS, actions=_ACTIONS.map(numbered))
def test_no_element_is_lost_or_given_twice_and_every_wait_ends_once(kind: QueueSettings, actions: Any) -> None:
    queue = machine(kind)
    commands = [command for ticket, action in enumerate(actions) for command in act(queue, *action, ticket)]
    # At the end no op may wait: a close ends every dequeue, after the enqueues are cancelled.
    commands += queue.close(cancel_pending=True)
    enqueues = {ticket: argument for ticket, (action, argument) in enumerate(actions) if action == "enqueue"}
    dequeues = {ticket: action for ticket, action in enumerate(actions) if action[0] in ("dequeue", "up_to")}
    answered = [command.ticket for command in commands]
    abandoned = {ticket - 1 - argument for ticket, (action, argument) in enumerate(actions) if action == "end"}
    assert len(answered) == len({*answered})
    assert {*answered} | abandoned >= enqueues.keys() | dequeues.keys() >= {*answered}
    given = [element for command in commands if isinstance(command, Serve) for element in command.elements]
    left = queue.order.contents()
    served = {command.ticket for command in commands if isinstance(command, Serve)}
    brought = [element for some in enqueues.values() for element in some]
    whole = [element for ticket, some in enqueues.items() if ticket in served for element in some]
    assert len({*given, *left}) == len(given) + len(left)
    assert {*whole} <= {*given, *left} <= {*brought}
    if kind.kind is QueueKind.FIFO:
        assert [*given, *left] == [element for element in brought if element in {*given, *left}]
    for command in commands:
        if isinstance(command, Serve) and command.ticket in dequeues:
            action, count = dequeues[command.ticket]
            assert len(command.elements) == count or (action == "up_to" and 0 < len(command.elements) < count)


@settings(max_examples=examples(300))
@given(kind=_KINDS, actions=_ACTIONS.map(numbered))
def test_asked_one_at_a_time_it_does_what_the_model_does(kind: QueueSettings, actions: Any) -> None:
    queue, model = machine(kind), QueueModel(kind)
    for ticket, (action, argument) in enumerate(actions):
        try:
            match action:
                case "enqueue":
                    model.enqueue(argument)
                    wanted: list[QueueCommand] = [Serve(ticket)]
                case "dequeue" | "up_to":
                    wanted = [Serve(ticket, tuple(model.dequeue(argument, action == "up_to")))]
                case "close" | "cancel":
                    model.is_closed, wanted = True, []
                case _:
                    continue
        except QueueClosed:
            wanted = [Fail(ticket)]
        except DeadlineExceeded:
            return  # the op waits, and the next ones depend on others
        assert act(queue, action, argument, ticket) == wanted
        assert sorted(queue.order.contents()) == sorted(model.elements)
