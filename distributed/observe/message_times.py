"""The messages of a trace, each with the event of its arrival and the number of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflow.lowering.queues.channel import edge_alone
from dflow.lowering.steps.step_events import RECEIVED, SENT, Event


@dataclass(frozen=True)
class SentMessage:
    """The values of one edge, sent in a step as one message.

    `sent`, `received`  events by the clocks of their tasks; `received` is None if the trace does not have it
    `values`            number of values, which a plan of either task declares; 0 if the trace has neither's item
    """

    source: str
    destination: str
    sent: Event
    received: Event | None
    values: int

    @property
    def edge(self) -> str:
        """The edge without the iteration numbers of loops."""
        return edge_alone(self.sent.name)

    @property
    def began_ns(self) -> int:
        """The time when the sender began to hand the message to its connection."""
        return self.sent.began_ns or self.sent.at_ns


#: A message of a trace: the starting task and the number of its step, the edge, the sender and the receiver. An edge
#: has at most one message in a step, or in an iteration of a loop.
MessageKey = tuple[str, int, str, str, str]


def sent_messages(events: Mapping[str, Sequence[Event]]) -> list[SentMessage]:
    """Return the messages whose sending was recorded, in order of tasks and of time."""
    received = {key_of(task, event): event for task, own in events.items() for event in own if event.what == RECEIVED}
    values = {
        (event.origin, event.step, event.name): event.values for own in events.values() for event in own if event.values
    }
    return [
        SentMessage(
            task,
            event.peer,
            event,
            received.get(key_of(task, event)),
            values.get((event.origin, event.step, edge_alone(event.name)), 0),
        )
        for task, own in events.items()
        for event in own
        if event.what == SENT
    ]


def key_of(task: str, event: Event) -> MessageKey:
    """Return the key of the message that `task` sent or received at `event`."""
    source, destination = (task, event.peer) if event.what == SENT else (event.peer, task)
    return (event.origin, event.step, event.name, source, destination)
