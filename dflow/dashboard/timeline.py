"""The last trace of some steps: made when a page asks for it, as `dflow trace` does, and kept until the next one.

Invariant: one trace is made at a time, and one is kept, its events in a file.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflow.dashboard.observing import trace
from dflow.distributed.observe.spans import spans
from dflow.distributed.observe.tracer import Trace
from dflow.distributed.transport.base import Transport
from dflow.lowering.steps.step_events import PART_BEGAN, STEP_BEGAN, Event
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DflowError

#: Most steps of a trace, and longest wait for them in s.
MOST_STEPS, LONGEST_S = 100, 600.0
MOST_ROWS = 500

Data = dict[str, Any]


class LastTimeline:
    """The last trace of the cluster; thread-safe. `on_change` is called with its JSON data, from any thread."""

    def __init__(self, transport: Transport, coordinator: str, on_change: Callable[[Data], None]) -> None:
        self._transport, self._coordinator, self._on_change = transport, coordinator, on_change
        #: Made for the first trace, so that a dashboard that is killed before leaves nothing.
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock = threading.Lock()
        self._data: Data = {"state": "none", "text": "", "number": 0}
        self._tables: Data = {"took": [], "messages": [], "items": [], "size_bytes": 0}
        self._file: Path | None = None
        self._thread: threading.Thread | None = None

    def json(self) -> Data:
        """Return the state of the trace, and its tables."""
        with self._lock:
            return self._data | self._tables

    def file(self) -> Path | None:
        """Return the file of the last trace for Perfetto, or None if there is none."""
        with self._lock:
            return self._file

    def start(self, steps: int, timeout_s: float) -> bool:
        """Begin to trace the next `steps` steps of each worker; return False if a trace is being made."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False
            number = self._data["number"] + 1
            text = f"waiting for {steps} steps of each worker"
            self._data = {"state": "running", "text": text, "number": number, "steps": steps}
            self._thread = threading.Thread(
                target=self._trace, args=(number, steps, timeout_s), name="dflow dashboard trace", daemon=True
            )
            self._thread.start()
        self._on_change(self.json())
        return True

    def close(self) -> None:
        """Remove the file. A trace that is being made ends at its tasks by its own deadline."""
        with self._lock:
            if self._folder is not None:
                self._folder.cleanup()

    def _trace(self, number: int, steps: int, timeout_s: float) -> None:
        try:
            with self._lock:
                self._folder = self._folder or tempfile.TemporaryDirectory(prefix="dflow-dashboard-")
                path = Path(self._folder.name, f"trace-{number}.json")
            found, lines = trace(self._transport, self._coordinator, path, steps=steps, timeout_s=timeout_s)
            tables = _tables(found) | {"size_bytes": path.stat().st_size}
            text = "; ".join(line.removeprefix(f"{path}: ").partition("; open it")[0] for line in lines)
        except (DflowError, OSError, ValueError) as error:
            with self._lock:
                self._data |= {"state": "failed", "text": str(error)}
        else:
            with self._lock:
                before, self._file = self._file, path
                self._tables = tables
                self._data |= {"state": "done", "text": text, "steps": found.steps}
            if before is not None:
                before.unlink(missing_ok=True)
        self._on_change(self.json())


def _tables(found: Trace) -> Data:
    """Return the tables of a trace: of the steps at each task, of the messages, and of the items of plans."""
    took = [
        {
            "task": short_task_name(row.task),
            "starters": row.starters,
            "steps": row.steps,
            "took_us": row.took_us,
            **{f"{name}_us": time_us for name, time_us in row.division._asdict().items()},
            "messages": row.messages,
            "values": row.values,
            "size_bytes": row.size_bytes,
        }
        for row in found.step_times()
    ]
    messages = [
        {**asdict(row), "source": short_task_name(row.source), "destination": short_task_name(row.destination)}
        for row in found.message_times()
    ]
    items = item_times(found.events)[:MOST_ROWS]
    return {"took": took[:MOST_ROWS], "messages": messages[:MOST_ROWS], "items": items}


def item_times(events: Mapping[str, Sequence[Event]]) -> list[Data]:
    """Return a row for each item of a plan at a task, by task, the longest first.

    `line`      the user's line with the file's path, or empty
    `kind`      Call for an XLA program, which may hold ops of further lines, and whose time ends when its results are
                computed; Send; Recv, whose time is a wait; and so on
    `per_step`  mean number of runs in a step that has the item
    `mean_us`   mean time of all its runs in such a step, in us
    """
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
    rows = []
    for key in sorted(total_ns, key=lambda key: (split_task_name(key[0]), -total_ns[key] / len(steps[key]))):
        task, line, name, kind = key
        row = {"task": short_task_name(task), "line": line, "name": name, "kind": kind}
        count = len(steps[key])
        rows.append(row | {"per_step": runs[key] / count, "mean_us": total_ns[key] / 1e3 / count})
    return rows
