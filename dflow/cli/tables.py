"""Terminal tables, and the table of tasks, one per row, of `dflow launch` and `dflow status`.

Its number of rows is limited: tasks that need attention come first, and the last row counts the others by state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dflow.distributed.launching.launcher import TaskRow

_TROUBLE = "red"
_STYLES = {"running": "green", "starting": "yellow", "ending": "yellow", "finished": "dim"}


def make_table(title: str, *columns: str, is_wide: bool = False) -> Table:
    """Return a table with left-aligned columns, or right-aligned if the name starts with `>`.

    is_wide  whether the table is as wide as the terminal, and its cells are not folded
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.expand = is_wide
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=is_wide)
    return table


def size_text(size_bytes: float) -> str:
    """Return a size with a decimal unit, such as 999 B, 1.2 kB or 3.4 MB."""
    size, units = float(size_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.{0 if units[0] == 'B' else 1}f} {units[0]}"


def time_text(us: float) -> str:
    """Return a time, such as 870 us or 12.3 ms."""
    return f"{us:.0f} us" if us < 9999.5 else f"{us / 1e3:.1f} ms"


@dataclass(frozen=True)
class TaskLine:
    """A row: the task's short name, its state with the style of that, and the cells of the other columns.

    `needs_a_look`  whether the row comes before others when not all fit
    """

    task: str
    state: str
    style: str
    rest: Sequence[RenderableType]
    needs_a_look: bool


def task_table(lines: Sequence[TaskLine], *columns: str, last: str, most: int, title: str = "") -> Table:
    """Return a table with at most `most` rows.

    columns  columns after task and state; right-aligned if the name starts with `>`
    last     name of the last column, which takes the remaining width and is truncated to it
    """
    table = make_table(title, "task", "state", *columns, is_wide=True)
    table.add_column(last, ratio=1, no_wrap=True, overflow="ellipsis")
    shown = lines if len(lines) <= most else sorted(lines, key=lambda line: not line.needs_a_look)[: most - 1]
    for line in shown:
        table.add_row(line.task, Text(line.state, line.style), *line.rest)
    left_out = Counter(line.state for line in lines if line not in shown)
    if left_out:
        states = ", ".join(f"{count} {state}" for state, count in left_out.most_common())
        table.add_row(f"{left_out.total()} more", Text(states, "dim"))
    return table


def launch_table(rows: Sequence[TaskRow], steps_per_s: Mapping[str, float], *, most: int) -> Table:
    """Return the table of a launch. `steps_per_s` has workers' rates by short name, shown while they run."""
    lines = []
    for row in rows:
        rate = f"{steps_per_s[row.task]:.1f}" if row.state == "running" and row.task in steps_per_s else ""
        cells = (Text(str(row.restarts or ""), _TROUBLE), rate, Text.from_ansi(row.last_line))
        style = _STYLES.get(row.state, _TROUBLE)
        lines.append(TaskLine(row.task, row.state, style, cells, needs_a_look=row.state not in _STYLES))
    return task_table(lines, ">restarts", ">steps/s", last="last line", most=most)
