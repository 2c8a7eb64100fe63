"""Display of a cluster: a progress line while it runs, and tables when it has ended.

Each view is built from one `Status` message and printed by rich; nothing here connects to the cluster. On a
terminal the progress line stays at the bottom and the output of the tasks scrolls above it; elsewhere a plain
line is printed every two seconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflow.cli.tables import launch_table, make_table, size_text, time_text
from dflow.dashboard.looks import StepRate, largest_first, steps_worked, type_text
from dflow.dashboard.traffic import grouped_traffic
from dflow.distributed.coordinator.membership import FINISHED, NORMAL_ENDS
from dflow.distributed.launching.launcher import LaunchView, TaskRow
from dflow.distributed.launching.run_logs import RunLogs
from dflow.distributed.steps.step_gate import PREPARES
from dflow.distributed.wire.messages.roster import EdgeTraffic, TaskInfo, summed
from dflow.distributed.wire.messages.status import PartCosts, SnapshotSize, Status, VariableInfo, WorkerProgress
from dflow.tracing.devices.task_name import short_task_name, split_task_name

PLAIN_LINE_S = 2.0
SAME_LINE_S = 30.0
#: Width of the tables, in characters, where the output is not a terminal.
PLAIN_WIDTH = 120
#: Most tasks named in a progress line that trace and compile one function.
MOST_NAMED = 3
NO_ANSWER = "the coordinator does not answer"
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red")


def progress_line(status: Status, steps_per_s: float) -> str:
    """Return steps done and in total, steps per second, the mean of the newest losses, and each worker's step time.

    And which workers trace and compile a function now.
    """
    prepared = _prepared(status)
    if not status.steps_total:
        return "  ".join(filter(None, [f"{status.now_s:5.1f} s", _present(status), prepared]))
    parts = [f"step {status.steps_done}/{status.steps_total}", f"{steps_per_s:.1f} steps/s"]
    losses = [worker.metrics["loss"] for worker in status.workers if "loss" in worker.metrics]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4f}")
    live = {info.task for info in status.tasks if info.left_at_s is None}
    parts += [
        f"{short_task_name(worker.task)} {1000 * worker.step_s:.1f} ms"
        for worker in status.workers
        if worker.task in live and worker.step_s
    ]
    # A job that goes on has steps before its tasks are up.
    present = _present(status) if status.expected and not steps_worked(status) else ""
    return "  ".join([*parts, *filter(None, [present, prepared])])


#: Function from a run's end to its closing tables, from its status and how each process ended, by full task name.
Closing = Callable[[Status, Mapping[str, str]], RenderableType]


def closing_tables(status: Status, ends: Mapping[str, str]) -> RenderableType:
    """Return all tables of a run, with every row. `ends` tells how each process ended, by full task name."""
    traffic = traffic_table(
        status.traffic,
        None,
        lambda size_bytes: f"Sent: {size_text(size_bytes)}",
        (">messages", ">values", ">MB"),
        lambda row: (str(row.messages or ""), str(row.values), f"{row.size_bytes / 1e6:.3f}"),
    )
    tables = (
        _results_table(status),
        _steps_table(status),
        _not_finite_table(status),
        traffic,
        _variables_table(status.variables, status.snapshot),
        _tasks_table(status, ends),
    )
    return Group(*(part for table in tables if table.row_count for part in (Text(), table)))


class TerminalView(LaunchView):
    """The launcher's display on a terminal: output of the tasks above a table of the tasks and a progress line."""

    def __init__(self, live: Live, closing: Closing) -> None:
        self._live = live
        self._closing = closing
        self._rate = StepRate()
        self._worker_rates: defaultdict[str, StepRate] = defaultdict(StepRate)
        self._steps_per_s: dict[str, float] = {}

    def show_line(self, task: str, line: str) -> None:
        text = Text(f"[{task}] ", style=_colour(task))
        text.append_text(Text.from_ansi(line))
        self._live.console.print(text, soft_wrap=True)

    def show_status(self, status: Status | None, rows: Sequence[TaskRow]) -> None:
        text = NO_ANSWER
        if status is not None:
            text = progress_line(status, self._rate.add(status.now_s, status.steps_done, steps_worked(status)))
            self._steps_per_s = {
                short_task_name(worker.task): self._worker_rates[worker.task].add(status.now_s, worker.steps)
                for worker in status.workers
            }
        table = launch_table(rows, self._steps_per_s, most=max(self._live.console.height // 2, 4))
        self._live.update(Group(table, Text(text, style="bold", overflow="ellipsis", no_wrap=True)))

    def show_event(self, text: str) -> None:
        self._live.console.print(Text(f"dflow: {text}", style="bold"), soft_wrap=True)

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        self._live.stop()
        if status is not None:
            self._live.console.print(self._closing(status, ends))


class PlainView(LaunchView):
    """The launcher's display in a file or a pipe: no colours, no cursor, one progress line every two seconds.

    Before the first run, the line counts the tasks that are up. While nothing changes, it is repeated every half
    minute. The rows of tasks are not shown: events report the tasks.
    """

    def __init__(self, console: Console, closing: Closing) -> None:
        self._console = console
        self._print = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self._closing = closing
        self._rate = StepRate()
        self._shown_at_s = 0.0
        self._shown: object = None

    def show_line(self, task: str, line: str) -> None:
        self._print(f"[{task}] {line}")

    def show_status(self, status: Status | None, rows: Sequence[TaskRow]) -> None:
        if status is None:
            return
        rate = self._rate.add(status.now_s, status.steps_done, steps_worked(status))
        present = "" if status.steps_total and steps_worked(status) else _present(status)
        news = status.steps_done, status.steps_total, present, _prepared(status)
        if status.now_s - self._shown_at_s >= (SAME_LINE_S if news == self._shown else PLAIN_LINE_S):
            self._shown_at_s, self._shown = status.now_s, news
            self._print(progress_line(status, rate))

    def show_event(self, text: str) -> None:
        self._print(f"dflow: {text}")

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        if status is not None:
            self._console.print(self._closing(status, ends))


class LoggedView(LaunchView):
    """A view that also writes to the run's log files; the launcher's own lines go to `launcher.log`.

    If the display or the logs cannot be written, as on a full disk, the other continues, and so does the run.
    """

    def __init__(self, view: LaunchView, logs: RunLogs) -> None:
        self._view = view
        self._logs = logs
        self._is_shown = True

    def show_line(self, task: str, line: str) -> None:
        self.log_line(task, line)
        self._show(self._view.show_line, task, line)

    def show_status(self, status: Status | None, rows: Sequence[TaskRow]) -> None:
        self._show(self._view.show_status, status, rows)

    def show_event(self, text: str) -> None:
        # Others may be able to read the logs, and the token of the dashboard's address is a password.
        self.log_line("launcher", _dated(re.sub(r"\?token=\S+", "?token=...", text)))
        self._show(self._view.show_event, text)

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        self._show(self._view.show_end, status, ends)

    def log_line(self, task: str, line: str) -> None:
        if news := self._logs.write(task, line):
            self._show(self._view.show_line, "launcher", news)

    def _show(self, show: Callable[..., None], *shown: Any) -> None:
        """Call `show`. An OSError is logged once; BrokenPipeError ends the run, as for other programs in a pipe."""
        try:
            show(*shown)
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._is_shown:
                self._is_shown = False
                self._logs.write("launcher", _dated(f"the output cannot be shown: {error.strerror}; the logs have it"))


def _dated(text: str) -> str:
    return f"{datetime.now().isoformat(timespec='seconds')} {text}"


def make_console() -> Console:
    """Return a console on standard output, wide enough for the tables if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)


@contextmanager
def launch_view(console: Console, closing: Closing) -> Iterator[TerminalView | PlainView]:
    """Yield the view for the console's kind of output, which shows `closing` at the end of the run."""
    if not console.is_terminal:
        yield PlainView(console, closing)
        return
    with Live(Text("starting"), console=console, refresh_per_second=8, transient=True) as live:
        yield TerminalView(live, closing)


def _prepared(status: Status) -> str:
    """Name the workers that trace and compile a function, and the function; empty if there is none."""
    by_text = defaultdict[str, list[str]](list)
    for health in status.health:
        if health.doing.startswith(PREPARES):
            by_text[health.doing].append(short_task_name(health.task))
    parts = (
        f"{', '.join(tasks) if len(tasks) <= MOST_NAMED else f'{len(tasks)} tasks'}: {text}"
        for text, tasks in by_text.items()
    )
    return "; ".join(parts)


def _present(status: Status) -> str:
    live = sum(info.left_at_s is None for info in status.tasks)
    waiting = "; waiting for " + ", ".join(map(short_task_name, status.expected)) if status.expected else ""
    return f"{live} of {live + len(status.expected)} tasks are up{waiting}"


def _colour(task: str) -> str:
    job, _, index = task.partition(":")
    if not index:
        return "white"
    return _COLOURS[(int(index) + (len(_COLOURS) // 2 if job == "ps" else 0)) % len(_COLOURS)]


def traffic_table(
    traffic: Iterable[EdgeTraffic],
    most: int | None,
    title: Callable[[int], str],
    columns: Sequence[str],
    cells: Callable[[EdgeTraffic], Sequence[str]],
) -> Table:
    """Return a table of the edges with the most traffic.

    most     number of rows; one more row sums up the rest; None shows all
    title    returns the title for the total number of bytes
    columns  the columns after the edge and its ends; `cells` returns a row's texts in them
    """
    rows = grouped_traffic(traffic)
    table = make_table(title(sum(row.size_bytes for row in rows)), "value", "from -> to", *columns)
    for row in rows[:most]:
        table.add_row(Text(row.edge), f"{row.source} -> {row.destination}", *cells(row))
    if most is not None and (rest := rows[most:]):
        table.add_row(f"{len(rest)} more", "", *cells(summed(rest)))
    return table


def _results_table(status: Status) -> Table:
    table = make_table("Results", "result", ">value")
    for name, value in status.results.items():
        table.add_row(Text(name), f"{value:.6g}")
    return table


def _steps_table(status: Status) -> Table:
    drops = any(worker.dropped for worker in status.workers)
    columns = ["worker", ">steps", *([">dropped"] if drops else []), ">step time", "metrics"]
    table = make_table(f"Steps: {status.steps_done} of {status.steps_total}", *columns)
    for worker in status.workers:
        counts = [str(worker.steps), *([str(worker.dropped)] if drops else [])]
        table.add_row(short_task_name(worker.task), *counts, *time_and_metrics(worker))
    return table


def time_and_metrics(worker: WorkerProgress) -> tuple[str, Text]:
    metrics = "  ".join(f"{name} {value:.4g}" for name, value in worker.metrics.items())
    return f"{1000 * worker.step_s:.1f} ms" if worker.step_s else "", Text(metrics)


def _not_finite_table(status: Status) -> Table:
    table = make_table("Not finite", "run", "metric", "value", ">first at step", "worker")
    for one in status.not_finite:
        table.add_row(Text(one.run), Text(one.metric), str(one.value), str(one.step), short_task_name(one.task))
    return table


def variables_total(variables: Sequence[VariableInfo], snapshot: SnapshotSize | None) -> str:
    """Return the number and size of the variables, and what the newest snapshot wrote of them."""
    total = f"{len(variables)}, {size_text(sum(info.size_bytes for info in variables))}"
    if snapshot is None:
        return total
    written, full = size_text(snapshot.written_bytes), size_text(snapshot.full_bytes)
    return f"{total}; snapshot {snapshot.number} wrote {written} of {full}"


def _variables_table(variables: Sequence[VariableInfo], snapshot: SnapshotSize | None) -> Table:
    title = f"Variables: {variables_total(variables, snapshot)}"
    table = make_table(title, "variable", "type", ">size", "task")
    for info in largest_first(variables):
        table.add_row(Text(info.name), Text(type_text(info)), size_text(info.size_bytes), short_task_name(info.task))
    return table


@dataclass(frozen=True)
class TaskEnd:
    """A task's times as texts, and why it left or that it lives.

    `is_newest`  false for an earlier process of a task that was started again
    """

    task: str
    joined: str
    left: str
    why: str
    is_newest: bool = True


def ends_of_tasks(status: Status, ends: Mapping[str, str]) -> list[TaskEnd]:
    """Return each process that joined, by task and time, then the tasks that never joined."""
    newest = {info.task: info for info in status.tasks}
    stalls = {health.task: health for health in status.health if health.stalled_since_s is not None}
    found = []
    for info in sorted(status.tasks, key=lambda info: (split_task_name(info.task), info.joined_at_s)):
        is_newest = newest[info.task] is info
        end = ends.get(info.task, "") if is_newest else ""
        left = "" if info.left_at_s is None else f"{info.left_at_s:.1f} s"
        why = _why(info, end)
        if not left and not end:
            stall = stalls.get(info.task)
            if stall is not None:
                why = f"stalled since {stall.stalled_since_s:.1f} s at: {stall.doing or 'steps that it claimed'}"
            why = "away" if info.task in status.away else why
        found.append(TaskEnd(info.task, f"{info.joined_at_s:.1f} s", left, why, is_newest))
    absent = (*status.expected, *(task for task in ends if task not in newest and task not in status.expected))
    return [*found, *(TaskEnd(task, "never", "", ends.get(task, "")) for task in absent)]


def _tasks_table(status: Status, ends: Mapping[str, str]) -> Table:
    costs = {cost.task: cost for cost in status.costs}
    columns = (">parts", ">processor", ">wake-ups") if costs else ()
    table = make_table("Tasks", "task", ">joined", ">left", *columns, "why")
    for each in ends_of_tasks(status, ends):
        cells = _cost_cells(costs.get(each.task) if each.is_newest else None)[: len(columns)]
        table.add_row(short_task_name(each.task), each.joined, each.left, *cells, Text(each.why))
    return table


def _cost_cells(cost: PartCosts | None) -> Sequence[str]:
    """Return the number of parts of steps, and what each cost: processor time and wake-ups."""
    if cost is None:
        return ("", "", "")
    return str(cost.parts), time_text(1e6 * cost.processor_s / cost.parts), f"{cost.wakeups / cost.parts:.1f}"


def _why(info: TaskInfo, end: str) -> str:
    """Return why the task left, combining the coordinator's reason and how its process ended."""
    if info.left_at_s is None:
        return end or "live"
    if end == FINISHED or (not end and info.left in NORMAL_ENDS):
        return FINISHED
    return f"{end} ({info.left})" if end else info.left
