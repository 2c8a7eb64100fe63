"""Tables of the costs of a step at each task: processor time, wake-ups, messages, and the division of its time.

`dflow trace --summary` prints all of them, by `show_summary`; `dflow status` has that of the use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflow.cli.tables import make_table, size_text, time_text
from dflow.dashboard.looks import LOOK_S, look, part_use
from dflow.dashboard.observing import ClusterObserver, trace
from dflow.distributed.observe.step_times import MessageTimes, StepTimes
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.observing import TaskState
from dflow.tracing.devices.task_name import short_task_name, split_task_name

#: Most rows of the tables of tasks and of messages.
MOST_TASKS, MOST_MESSAGES = 50, 30


def usage_table(before: Mapping[str, TaskState], now: Mapping[str, TaskState], took_s: float, *, most: int) -> Table:
    """Return the use of the processor and the messages per part of a step, between two states `took_s` apart.

    *missed* is the mean number of updates by other steps between a part's read of variables and its own update of them,
    in asynchronous training; a task without such parts has none.
    A row of a task without `usage`, or that was started again, is left out. At most `most` tasks have a row.
    """
    columns = ("parts/s", "processor", "Python", "XLA's threads", "wake-ups", "messages", "values", "bytes", "missed")
    table = make_table("A part of a step now", "task", *(f">{column}" for column in columns))
    rows = {
        task: cells
        for task in sorted(now, key=split_task_name)
        if task in before and (cells := _usage_cells(before[task], now[task], took_s))
    }
    for task, cells in list(rows.items())[:most]:
        table.add_row(short_task_name(task), *cells)
    if len(rows) > most:
        table.add_row(f"{len(rows) - most} more")
    return table


def _usage_cells(before: TaskState, now: TaskState, took_s: float) -> list[str]:
    if (use := part_use(before, now)) is None:
        return []
    parts, used = use
    times_s = used.python_s, used.other_s
    shares = [f"{parts / took_s:.1f}", f"{100 * sum(times_s) / took_s:.0f} %"]
    if not parts:
        return [*shares, *[""] * 7]
    return [
        *shares,
        *(time_text(1e6 * time_s / parts) for time_s in times_s),
        *(f"{count / parts:.1f}" for count in (used.wakeups, used.messages, used.values)),
        size_text(used.size_bytes / parts),
        f"{used.missed / used.updates:.1f}" if used.updates else "",
    ]


def step_tables(rows: Sequence[StepTimes]) -> list[Table]:
    """Return a table for each job whose tasks started steps: the mean time of a step in us at each task."""
    tables: dict[str, Table] = {}
    columns = ("steps", "took", "Python", "XLA", "sending", "wire", "waiting", "messages", "values", "bytes")
    for row in rows:
        title = f"A step of {row.starters}:*, in us"
        table = tables.setdefault(row.starters, make_table(title, "task", *(f">{column}" for column in columns)))
        times = (f"{us:.0f}" for us in (row.took_us, *row.division))
        sent = (f"{row.messages:.1f}", f"{row.values:.1f}", size_text(row.size_bytes))
        table.add_row(short_task_name(row.task), str(row.steps), *times, *sent)
    return list(tables.values())


def message_table(rows: Sequence[MessageTimes], *, most: int) -> Table:
    """Return the messages of a step by edge, the `most` largest, with their times in us."""
    columns = ("messages", "values each", "bytes each", "sending", "arrived after")
    table = make_table("Messages of a step, in us", "message", "from -> to", *(f">{column}" for column in columns))
    for row in rows[:most]:
        arrived = f"{row.arrival_us:.0f}" if row.arrival_us is not None else ""
        table.add_row(
            Text(row.edge),
            f"{short_task_name(row.source)} -> {short_task_name(row.destination)}",
            f"{row.messages:.1f}",
            f"{row.values:g}" if row.values else "",
            size_text(row.size_bytes),
            f"{row.sending_us:.0f}",
            arrived,
        )
    if len(rows) > most:
        table.add_row(f"{len(rows) - most} more")
    return table


def show_summary(
    transport: Transport,
    coordinator: str,
    console: Console,
    *,
    steps: int,
    timeout_s: float,
    path: Path | None = None,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Print the tables for the next `steps` steps of each worker, and write the trace to `path` unless it is None.

    The use is that of the second before the trace, which costs some itself.

    raises  DeadlineExceeded when no step ends within `timeout_s` seconds
    """
    with closing(ClusterObserver(transport, coordinator)) as observer, ThreadPoolExecutor(16) as pool:
        before = look(observer, pool)
        wait(LOOK_S)
        now = look(observer, pool)
    found, lines = trace(transport, coordinator, path, steps=steps, timeout_s=timeout_s)
    tables = (
        *step_tables(found.step_times()),
        message_table(found.message_times(), most=MOST_MESSAGES),
        usage_table(before.states, now.states, now.at_s - before.at_s, most=MOST_TASKS),
    )
    for table in tables:
        if table.row_count:
            console.print(table, Text(), sep="\n")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
