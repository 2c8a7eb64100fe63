"""The events of many tasks as one trace for Perfetto and chrome://tracing, in the Trace Event Format.

Each task is a process, with tracks for the steps it started, its parts of steps, its computations, transfers and
waits. An arrow goes from each send to the arrival of the value. The format forbids slices that overlap without being
nested, so such slices go to further tracks of the same name. Times are in us from the first event, by the tracer's
clock: see `clock_alignment`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflow.distributed.observe.clock_alignment import Crossing, Offset
from dflow.distributed.observe.spans import Span, spans
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE
from dflow.lowering.steps.recorder import (
    CONNECTED,
    CONNECTION_LOST,
    PART_BEGAN,
    RECEIVED,
    ROSTER_CHANGED,
    SENT,
    STEP_BEGAN,
    STEP_ENDED,
    WAIT_EXPIRED,
    Event,
)
from dflow.tracing.devices.task_name import short_task_name, split_task_name

TRACKS = ("steps", "parts of steps", "compute", "transfers", "waits", "branches and loops")
_TRACK_OF_ITEM = {
    "Call": "compute",
    "Copy": "compute",
    "Read": "compute",
    "Send": "transfers",
    "Recv": "waits",
    "UseResource": "waits",
}
_INSTANTS = (CONNECTED, CONNECTION_LOST, ROSTER_CHANGED, WAIT_EXPIRED)
#: Drawn length of an arrival, which has no duration.
_ARRIVAL_NS = 1000

Events = Mapping[str, Sequence[Event]]
_Value = tuple[str, int, str, str, str]


def first_steps(events: Events, steps: int | None) -> dict[str, list[Event]]:
    """Keep the events of the first `steps` complete steps (None: of all) that each task started, and of no step."""
    wanted: set[tuple[str, int]] = set()
    for task, own in events.items():
        began = {event.step for event in own if event.what == STEP_BEGAN and event.origin == task}
        whole = sorted(began & {event.step for event in own if event.what == STEP_ENDED and event.origin == task})
        wanted |= {(task, number) for number in whole[:steps]}
    return {
        task: [event for event in own if not event.origin or (event.origin, event.step) in wanted]
        for task, own in events.items()
    }


def crossings(events: Events) -> list[Crossing]:
    """The values whose sending and arrival were both recorded."""
    return [
        Crossing(value[3], sent.began_ns or sent.at_ns, value[4], received.at_ns)
        for value, (sent, received) in _transfers(events).items()
    ]


def trace_of(events: Events, offsets: Mapping[str, Offset]) -> dict[str, Any]:
    """Return the trace as JSON data; `otherData` has the clocks' offsets and errors."""
    tasks = sorted(events, key=split_task_name)
    times = [
        min(event.at_ns, event.began_ns or event.at_ns) - offsets[task].offset_ns
        for task in tasks
        for event in events[task]
    ]
    start_ns = min(times, default=0)
    arrows = {value: number for number, value in enumerate(_transfers(events), 1)}
    found: list[dict[str, Any]] = []
    for pid, task in enumerate(tasks, 1):
        own = _Process(task, pid, start_ns + offsets[task].offset_ns, arrows)
        found += own.told(events[task])
    clocks = {
        short_task_name(task): {
            "ahead of ours by us": offsets[task].offset_ns / 1e3,
            "give or take us": offsets[task].error_ns / 1e3,
        }
        for task in tasks
    }
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"clocks": clocks}}


def _transfers(events: Events) -> dict[_Value, tuple[Event, Event]]:
    """By step, edge and both tasks, the sending and the arrival of each value: an edge has at most one in a step."""
    sent, received = (
        {_value(task, event): event for task, own in events.items() for event in own if event.what == what}
        for what in (SENT, RECEIVED)
    )
    return {value: (event, received[value]) for value, event in sent.items() if value in received}


def _value(task: str, event: Event) -> _Value:
    ends = (task, event.peer) if event.what == SENT else (event.peer, task)
    return (event.origin, event.step, event.name, *ends)


@dataclass(frozen=True)
class _Slice:
    track: str
    name: str
    start_ns: int
    end_ns: int
    about: Mapping[str, Any]
    #: The end of an arrow, at the start of the slice.
    arrow: Mapping[str, Any] | None = None


class _Process:
    """One task of the trace. `zero_ns` is the start of the trace by the task's clock."""

    def __init__(self, task: str, pid: int, zero_ns: int, arrows: Mapping[_Value, int]) -> None:
        self._task, self._pid, self._zero_ns, self._arrows = task, pid, zero_ns, arrows

    def told(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        last_ns = max((event.at_ns for event in events), default=0)
        transfers = [self._transfer(event) for event in events if event.what in (SENT, RECEIVED)]
        lanes = _in_lanes([*(_slice_of(span, last_ns) for span in spans(events)), *transfers])
        found = [self._meta("process_name", 0, name=short_task_name(self._task))]
        found.append(self._meta("process_sort_index", 0, sort_index=self._pid))
        for tid, (track, slices) in enumerate(lanes, 1):
            found.append(self._meta("thread_name", tid, name=track))
            found.append(self._meta("thread_sort_index", tid, sort_index=tid))
            for each in slices:
                took_us = (each.end_ns - each.start_ns) / 1e3
                about = {"name": each.name, "cat": track, "ph": "X", "dur": took_us, "args": dict(each.about)}
                found.append({**about, **self._at(each.start_ns, tid)})
                if each.arrow:
                    found.append({**each.arrow, **self._at(each.start_ns, tid)})
        for event in events:
            if event.what in _INSTANTS:
                said = ": ".join(text for text in (event.what, short_task_name(event.peer), event.text) if text)
                found.append({"name": said, "cat": "cluster", "ph": "i", "s": "p", **self._at(event.at_ns, 0)})
        return found

    def _transfer(self, event: Event) -> _Slice:
        """A slice for the sending of a value, which may outlast its Send item, or for an arrival."""
        is_sent = event.what == SENT
        arrow = None
        number = self._arrows.get(_value(self._task, event))
        if number is not None:
            way = {"ph": "s"} if is_sent else {"ph": "f", "bp": "e"}
            arrow = {"name": event.name, "cat": "transfers", "id": number, **way}
        name = f"{event.name} {'to' if is_sent else 'from'} {short_task_name(event.peer)}"
        end_ns = event.at_ns if is_sent else event.at_ns + _ARRIVAL_NS
        about = {"step": _step(event), "bytes": event.size_bytes, "value": event.name}
        return _Slice("transfers", name, event.began_ns or event.at_ns, end_ns, about, arrow)

    def _at(self, at_ns: int, tid: int) -> dict[str, Any]:
        return {"ts": (at_ns - self._zero_ns) / 1e3, "pid": self._pid, "tid": tid}

    def _meta(self, what: str, tid: int, **about: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": self._pid, "tid": tid, "args": about}


def _slice_of(span: Span, last_ns: int) -> _Slice:
    began, ended = span.began, span.computed or span.ended
    end_ns = max(ended.at_ns if ended is not None else last_ns, began.at_ns)
    about: dict[str, Any] = {"step": _step(began)}
    if ended is None:
        about["goes on"] = True
    if span.ended is not None and span.ended.text:
        about["error"] = span.ended.text
    if began.what in (STEP_BEGAN, PART_BEGAN):
        return _Slice(TRACKS[began.what == PART_BEGAN], _step(began), began.at_ns, end_ns, about)
    if began.line:
        about["line"] = began.line
    return _Slice(_TRACK_OF_ITEM.get(began.kind, TRACKS[-1]), _item(began), began.at_ns, end_ns, about)


def _item(event: Event) -> str:
    verb = {"Send": "send to", "Recv": "wait for"}.get(event.kind) if event.peer else ""
    who = f" {verb} {short_task_name(event.peer)}" if verb else ""
    return f"{event.name or event.kind}{who}"


def _step(event: Event) -> str:
    return f"step {event.step % STEPS_OF_A_LIFE} of {short_task_name(event.origin)}"


def _in_lanes(slices: Iterable[_Slice]) -> list[tuple[str, list[_Slice]]]:
    """Tracks in order, each repeated as often as needed so that its slices overlap only when nested."""
    lanes: list[tuple[str, list[_Slice]]] = []
    for track in TRACKS:
        rows: list[tuple[list[int], list[_Slice]]] = []
        wanted = sorted((each for each in slices if each.track == track), key=lambda s: (s.start_ns, -s.end_ns))
        for each in wanted:
            row = next((row for row in rows if _fits(row[0], each)), None)
            if row is None:
                row = ([], [])
                rows.append(row)
            row[0].append(each.end_ns)
            row[1].append(each)
        lanes += [(track, row) for _, row in rows]
    return lanes


def _fits(ends: list[int], each: _Slice) -> bool:
    """Whether the slice fits a row: after its open slices, or inside the innermost. Drops from `ends` those over."""
    while ends and ends[-1] <= each.start_ns:
        ends.pop()
    return not ends or each.end_ns <= ends[-1]
