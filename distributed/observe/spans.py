"""Spans of a task's steps, parts and items: each a pair of events, its beginning and its end.

An item of a loop's body may run in several iterations concurrently. Among events that look alike, the first beginning
is paired with the first end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from dflow.lowering.steps.step_events import (
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
    """A step, a task's part of a step, or an item of a plan; `ended` is None while it runs.

    `computed`  event that the results of an XLA call were seen to be ready
    """

    began: Event
    ended: Event | None = None
    computed: Event | None = None


def spans(events: Iterable[Event]) -> list[Span]:
    """Pair the events into spans, in order of beginning; an end without its beginning is ignored."""
    found: list[Span] = []
    open_spans: defaultdict[Hashable, list[Span]] = defaultdict(list)
    for event in events:
        key = (event.origin, event.step, event.number, event.name)
        if event.what in _BEGINNINGS:
            span = Span(event)
            found.append(span)
            open_spans[_BEGINNINGS[event.what], key].append(span)
            if event.kind == "Call":
                open_spans[COMPUTED, key].append(span)
        elif event.what == COMPUTED:
            if computing := open_spans[COMPUTED, key]:
                computing.pop(0).computed = event
        elif event.what in _ENDS and (running := open_spans[_ENDS[event.what], key]):
            running.pop(0).ended = event
    return found
