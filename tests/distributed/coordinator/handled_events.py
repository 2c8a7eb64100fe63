"""The events that a coordinator handles, for tests that look at them."""

from __future__ import annotations

from dflow.distributed.coordinator.coordinator_events import Command, Event
from dflow.distributed.coordinator.coordinator_state import CoordinatorState


def handled_events(state: CoordinatorState) -> list[Event]:
    """Return a list that gets each event that `state` handles from now on."""
    events, handle = list[Event](), state.handle

    def note(event: Event) -> list[Command]:
        events.append(event)
        return handle(event)

    state.handle = note  # type: ignore[method-assign]
    return events
