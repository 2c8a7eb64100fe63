"""`dflow status`: tables of the tasks of a running cluster and of the traffic between them, once or live.

The coordinator reports membership, heartbeats and traffic; each task reports its own state. The tables need two
snapshots of both, since rates are differences.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dflow.cli.closing_summary import closing_summary
from dflow.cli.cost_tables import usage_table
from dflow.cli.observing import ClusterObserver, live_tasks
from dflow.cli.status_view import Closing, progress_line, traffic_table
from dflow.cli.tables import TaskLine, size_text, task_table
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.observing import GetTaskState, TaskState
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo
from dflow.distributed.wire.messages.status import Status, TaskHealth
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, TransportClosed

LOOK_S = 1.0
#: Longest wait for an answer of a task, in s.
TASK_S = 2.0
#: A straggler's step time is more than this multiple of its job's median.
SLOW = 1.5
#: A task without a heartbeat for longer than this, in s, is shown as silent; heartbeats come every second.
SILENT_S = 3.0
MOST_TASKS, MOST_EDGES = 50, 10
LIVE = "live"


@dataclass(frozen=True)
class Look:
    """A snapshot: the coordinator's status, and the states of the tasks that answered, by full task name."""

    at_s: float
    status: Status
    states: Mapping[str, TaskState]


def look(observer: ClusterObserver, pool: Executor) -> Look:
    """Take a snapshot. Tasks that do not answer within `TASK_S` are left out."""
    status = observer.status()
    live = live_tasks(status)
    answers = zip(live, pool.map(partial(_state_of, observer), live), strict=True)
    states = {info.task: state for info, state in answers if state is not None}
    return Look(time.monotonic(), status, states)


def _state_of(observer: ClusterObserver, info: TaskInfo) -> TaskState | None:
    try:
        return observer.peer(info, TASK_S).call(GetTaskState(usage=True), timeout_s=TASK_S).message
    except (DflowError, OSError, ValueError):
        return None


def show_status(
    transport: Transport,
    coordinator: str,
    console: Console,
    *,
    watch: bool,
    summary: Closing = closing_summary,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Print the tables, and `summary` of the run so far; or with `watch`, refresh the tables until Ctrl-C or its end.

    raises  DeadlineExceeded when the coordinator does not answer; with `watch`, that ends the display instead
    """
    with closing(ClusterObserver(transport, coordinator)) as observer, ThreadPoolExecutor(16) as pool:
        try:
            before = look(observer, pool)
            wait(LOOK_S)
            now = look(observer, pool)
            if not watch:
                console.print(live_view(before, now), summary(now.status, {}))
                return
            with Live(live_view(before, now), console=console, auto_refresh=False) as live:
                while True:
                    wait(LOOK_S)
                    before, now = now, look(observer, pool)
                    live.update(live_view(before, now), refresh=True)
        except KeyboardInterrupt:
            return
        except (DeadlineExceeded, TransportClosed):
            if not watch:
                raise
            console.print("the coordinator does not answer any more")


def live_view(before: Look, now: Look) -> RenderableType:
    """Return the progress line, the tables of tasks and of their costs, and that of the edges with the most traffic."""
    took_s = max(now.at_s - before.at_s, 1e-9)
    done = now.status.steps_done - before.status.steps_done

    def rate_text(size_bytes: int) -> str:
        return f"{size_text(int(size_bytes / took_s))}/s"

    parts: list[RenderableType] = [Text(progress_line(now.status, done / took_s)), Text(), _tasks(before, now)]
    costs = usage_table(before.states, now.states, took_s, most=MOST_TASKS)
    if costs.row_count:
        parts += [Text(), costs]
    traffic = _recent_traffic(before.status, now.status)
    if traffic:
        edges = traffic_table(
            traffic,
            MOST_EDGES,
            lambda size_bytes: f"Sent now: {rate_text(size_bytes)}",
            (">messages/s", ">values/s", ">bytes/s"),
            lambda row: (
                f"{row.messages / took_s:.1f}" if row.messages else "",
                f"{row.values / took_s:.1f}",
                rate_text(row.size_bytes),
            ),
        )
        parts += [Text(), edges]
    return Group(*parts)


def stragglers(states: Mapping[str, TaskState]) -> dict[str, float]:
    """Return the tasks whose step time is more than `SLOW` times their job's median, with that ratio."""
    found: dict[str, float] = {}
    times: dict[str, dict[str, float]] = {}
    for task, state in states.items():
        if state.step_s:
            times.setdefault(split_task_name(task)[0], {})[task] = state.step_s
    for of_job in times.values():
        # The lower of the two middle values, so that one of two tasks can be a straggler.
        median = statistics.median_low(of_job.values())
        found |= {task: time_s / median for task, time_s in of_job.items() if time_s > SLOW * median}
    return found


def _tasks(before: Look, now: Look) -> RenderableType:
    columns = (">steps/s", ">step time", ">running", ">waiting", "queues", ">heard")
    health = {each.task: each for each in now.status.health}
    slow = stragglers(now.states)
    lines = [_line(info, health.get(info.task), slow, before, now) for info in live_tasks(now.status)]
    return task_table(lines, *columns, last="at", most=MOST_TASKS, title="Tasks now")


def _line(info: TaskInfo, known: TaskHealth | None, slow: Mapping[str, float], before: Look, now: Look) -> TaskLine:
    load = _load(now.states.get(info.task), before.states.get(info.task), now.at_s - before.at_s)
    heard, doing = "never", ""
    if known is not None:
        heard, doing = f"{now.status.now_s - known.heard_at_s:.1f} s ago", known.doing
    said, style = _state_text(info, known, slow, now)
    return TaskLine(short_task_name(info.task), said, style, (*load, heard, Text(doing)), needs_a_look=said != LIVE)


def _load(state: TaskState | None, earlier: TaskState | None, took_s: float) -> tuple[RenderableType, ...]:
    """Return the cells of a task's steps per second, step time, parts and values awaited, and its fullest queues."""
    if state is None:
        return ("",) * 5
    rate = ""
    if earlier is not None and state.steps and took_s > 0:
        rate = f"{max(state.steps - earlier.steps, 0) / took_s:.1f}"
    step_time = f"{1e3 * state.step_s:.1f} ms" if state.step_s else ""
    fullest = sorted(state.depths, key=lambda depth: -depth.size)[:3]
    depths = [f"{depth.name} {depth.size}" + (f"/{depth.capacity}" if depth.capacity else "") for depth in fullest]
    more = f" and {len(state.depths) - 3} more" if len(state.depths) > 3 else ""
    return rate, step_time, str(state.running), str(state.waiting), Text(", ".join(depths) + more)


def _state_text(info: TaskInfo, known: TaskHealth | None, slow: Mapping[str, float], now: Look) -> tuple[str, str]:
    if info.task in now.status.away:
        return "away", "yellow"
    if known is not None and known.stalled_since_s is not None:
        return f"stalled for {now.status.now_s - known.stalled_since_s:.0f} s", "red"
    if known is not None and now.status.now_s - known.heard_at_s > SILENT_S:
        return "silent", "red"
    if info.task not in now.states:
        return "live, not reached", "yellow"
    if info.task in slow:
        return f"straggler, {slow[info.task]:.1f} x the median", "yellow"
    return LIVE, "green"


def _recent_traffic(before: Status, now: Status) -> list[EdgeTraffic]:
    earlier = {(entry.edge, entry.source, entry.destination): entry for entry in before.traffic}
    found = []
    for entry in now.traffic:
        known = earlier.get((entry.edge, entry.source, entry.destination)) or replace(
            entry, values=0, size_bytes=0, messages=0
        )
        sent = replace(
            entry,
            values=entry.values - known.values,
            size_bytes=entry.size_bytes - known.size_bytes,
            messages=max(entry.messages - known.messages, 0),
        )
        if sent.values > 0 and sent.size_bytes >= 0:
            found.append(sent)
    return found
