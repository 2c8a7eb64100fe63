"""Measured time of the items of a plan, such as XLA programs, by the user's line, from the events of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflow.distributed.observe.spans import spans
from dflow.lowering.steps.step_events import PART_BEGAN, STEP_BEGAN, Event
from dflow.tracing.devices.task_name import split_task_name


@dataclass(frozen=True)
class ItemTime:
    """Time of one item of a plan at a task, in the steps that have it.

    `line`      the user's line with the file's path, or empty
    `kind`      Call for an XLA program, which may hold ops of further lines, and whose time ends when its results are
                computed; Send; Recv, whose time is a wait; and so on
    `per_step`  number of runs in a step
    `mean_us`   mean time in a step, of all its runs, in us
    """

    task: str
    line: str
    name: str
    kind: str
    per_step: float
    mean_us: float


def item_times(events: Mapping[str, Sequence[Event]]) -> list[ItemTime]:
    """Return the times by task, the longest first."""
    total_ns: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    runs: defaultdict[tuple[str, str, str, str], int] = defaultdict(int)
    steps: defaultdict[tuple[str, str, str, str], set[tuple[str, int]]] = defaultdict(set)
    for task, own in events.items():
        for span in spans(own):
            began, ended = span.began, span.computed or span.ended
            if ended is None or began.what in (STEP_BEGAN, PART_BEGAN):
                continue
            key = task, began.line, began.name, began.kind
            total_ns[key] += max(ended.at_ns - began.at_ns, 0)
            runs[key] += 1
            steps[key].add((began.origin, began.step))
    found = [ItemTime(*key, runs[key] / len(steps[key]), total_ns[key] / 1e3 / len(steps[key])) for key in total_ns]
    return sorted(found, key=lambda item: (split_task_name(item.task), -item.mean_us))
