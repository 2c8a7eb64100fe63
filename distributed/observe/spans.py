"""Spans of a task's steps, parts and items: each a pair of events, its beginning and its end.

An item of a loop's body may run in several iterations concurrently. Among events that look alike, the first beginning
is paired with the first end.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from dflow.lowering.steps.recorder import (
    COMPUTED,
    ITEM_BEGAN,
    ITEM_ENDED,
    ITEM_FAILED,
    PART_BEGAN,
    PART_ENDED,
    STEP_BEGAN,
    STEP_ENDED,
    Event,
)

_BEGINNINGS = {STEP_BEGAN: "step", PART_BEGAN: "part", ITEM_BEGAN: "item"}
_ENDS = {STEP_ENDED: "step", PART_ENDED: "part", ITEM_ENDED: "item", ITEM_FAILED: "item"}


@dataclass
class Span:
    """A step, a part of one, or an item; `ended` is None while it runs.

    `computed`  event that the results of an XLA call were seen to be ready
    """

    began: Event
    ended: Event | None = None
    computed: Event | None = None


def spans(events: Iterable[Event]) -> list[Span]:
    """Pair the events into spans, in order of beginning; an end without its beginning is ignored."""
    found: list[Span] = []
    going_on: dict[Hashable, list[Span]] = {}
    being_computed: dict[Hashable, list[Span]] = {}
    for event in events:
        if event.what in _BEGINNINGS:
            span = Span(event)
            found.append(span)
            going_on.setdefault(_key(_BEGINNINGS[event.what], event), []).append(span)
            if event.kind == "Call":
                being_computed.setdefault(_key("item", event), []).append(span)
        elif event.what in _ENDS:
            waiting = going_on.get(_key(_ENDS[event.what], event))
            if waiting:
                waiting.pop(0).ended = event
        elif event.what == COMPUTED:
            waiting = being_computed.get(_key("item", event))
            if waiting:
                waiting.pop(0).computed = event
    return found


def _key(what: str, event: Event) -> Hashable:
    return what, event.origin, event.step, event.number, event.name
