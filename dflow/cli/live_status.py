"""`dflow status`: tables of the tasks of a running cluster and of the traffic between them, once or live.

The coordinator reports membership, heartbeats and traffic; each task reports its own state. The tables need two
snapshots of both, since rates are differences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dflow.cli.closing_summary import closing_summary
from dflow.cli.cost_tables import MOST_TASKS, usage_table
from dflow.cli.status_view import Closing, progress_line, traffic_table
from dflow.cli.tables import TaskLine, size_text, task_table
from dflow.dashboard.looks import LOOK_S, Look, StepRate, condition, look, steps_worked, stragglers
from dflow.dashboard.observing import ClusterObserver, live_tasks
from dflow.dashboard.traffic import recent_traffic
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.observing import TaskState
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import TaskHealth
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, TransportClosed

MOST_EDGES = 10
#: Colours of the conditions of tasks.
_STYLES = {"ok": "green", "warn": "yellow", "bad": "red"}


def show_status(
    transport: Transport,
    coordinator: str,
    console: Console,
    *,
    watch: bool,
    summary: Closing = closing_summary,
    wait: Callable[[float], object] = time.sleep,
) -> None:
    """Print the tables, and a `summary` of the run; or with `watch`, refresh the tables until Ctrl-C or its end.

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
    rate = StepRate()
    rate.add(before.at_s, before.status.steps_done, steps_worked(before.status))
    newest = rate.add(now.at_s, now.status.steps_done, steps_worked(now.status))

    def rate_text(size_bytes: int) -> str:
        return f"{size_text(int(size_bytes / took_s))}/s"

    parts: list[RenderableType] = [Text(progress_line(now.status, newest)), Text(), _tasks(before, now)]
    costs = usage_table(before.states, now.states, took_s, most=MOST_TASKS)
    if costs.row_count:
        parts += [Text(), costs]
    traffic = recent_traffic(before.status, now.status)
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
    found = condition(info, known, slow, now)
    cells = (*load, heard, Text(doing))
    style, needs_a_look = _STYLES[found.level], not found.is_good
    return TaskLine(short_task_name(info.task), found.text, style, cells, needs_a_look=needs_a_look)


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
