"""Check a file against the Trace Event Format, by its published description and Perfetto's additions.

Only the events that dflow writes are known: complete events (X), instants (i), flows (s, f) and metadata (M).
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def faults_of(data: bytes) -> list[str]:
    """Return the faults of the trace; empty if it is valid."""
    trace = json.loads(data)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list of traceEvents"]
    events = trace["traceEvents"]
    faults = [f"{fault}: {event}" for event in events for fault in _faults_of_event(event)]
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        faults.append(f"displayTimeUnit is {trace['displayTimeUnit']!r}")
    if faults:
        return faults
    return [*_faults_of_nesting(events), *_faults_of_flows(events), *_faults_of_names(events)]


def _faults_of_event(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["an event is no object"]
    faults = [f"{key} is missing or no number" for key in ("ts", "pid", "tid") if not _is_number(event.get(key))]
    faults += [f"{key} is no whole number" for key in ("pid", "tid") if not isinstance(event.get(key), int)]
    if not isinstance(event.get("name"), str):
        faults.append("name is missing or no text")
    if not isinstance(event.get("args", {}), dict):
        faults.append("args is no object")
    match event.get("ph"):
        case "X":
            if not _is_number(event.get("dur")) or event["dur"] < 0:
                faults.append("dur of a complete event is missing or negative")
        case "i":
            if event.get("s", "t") not in ("g", "p", "t"):
                faults.append("the scope of an instant is none of g, p, t")
        case "s" | "f":
            if not isinstance(event.get("id"), int | str) or not isinstance(event.get("cat"), str):
                faults.append("a flow needs id and cat")
        case "M":
            key, kind = _METADATA.get(event.get("name", ""), ("", object))
            if not key or not isinstance(event.get("args", {}).get(key), kind):
                faults.append("metadata that is not known, or without its argument")
        case other:
            faults.append(f"ph is {other!r}")
    return faults


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _faults_of_nesting(events: list[dict[str, Any]]) -> list[str]:
    """Slices of one thread are nested or disjoint."""
    faults = []
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        ends: list[float] = []
        for event in sorted(slices, key=lambda event: (event["ts"], -event["dur"])):
            while ends and ends[-1] <= event["ts"] + _ROUNDING_US:
                ends.pop()
            end = event["ts"] + event["dur"]
            if ends and end > ends[-1] + _ROUNDING_US:
                faults.append(f"a slice overlaps another of its thread: {event}")
            ends.append(end)
    return faults


def _faults_of_flows(events: list[dict[str, Any]]) -> list[str]:
    """Each arrow has one beginning and one later end, both inside a slice."""
    ends: dict[tuple[Any, str], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"], event["cat"]].append(event)
    faults = []
    for both in ends.values():
        if sorted(event["ph"] for event in both) != ["f", "s"]:
            faults.append(f"an arrow without both its ends: {both}")
            continue
        start, end = sorted(both, key=lambda event: event["ph"] == "f")
        if start["ts"] > end["ts"]:
            faults.append(f"an arrow goes back in time: {start} {end}")
        faults += [f"an arrow's end is in no slice: {event}" for event in both if not _is_in_a_slice(event, events)]
    return faults


def _is_in_a_slice(point: dict[str, Any], events: list[dict[str, Any]]) -> bool:
    return any(
        event["ph"] == "X"
        and (event["pid"], event["tid"]) == (point["pid"], point["tid"])
        and event["ts"] - _ROUNDING_US <= point["ts"] <= event["ts"] + event["dur"] + _ROUNDING_US
        for event in events
    )


def _faults_of_names(events: list[dict[str, Any]]) -> list[str]:
    """Each process and each thread with slices has one name."""
    named: dict[str, list[Any]] = {"process_name": [], "thread_name": []}
    for event in events:
        if event["ph"] == "M" and event["name"] in named:
            named[event["name"]].append((event["pid"], event["tid"]) if "thread" in event["name"] else event["pid"])
    used = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    faults = [f"{what} is given twice" for what, found in named.items() if len(found) != len(set(found))]
    faults += [f"thread {thread} has no name" for thread in used - set(named["thread_name"])]
    return faults + [f"process {pid} has no name" for pid in {pid for pid, _ in used} - set(named["process_name"])]


#: Times are fractions of us, rounded.
_ROUNDING_US = 1e-3
