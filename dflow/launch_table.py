"""The tasks of a launch as a table on the terminal: state, restarts, steps per second, last line of output.

It shares the terminal with the lines that scroll above it, so it has a bound on its rows: tasks that need a look come
first, and what does not fit is counted in the last row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from dflow.distributed.launcher import TaskRow

_STYLES = {"running": "green", "starting": "yellow", "ending": "yellow", "finished": "dim"}
_TROUBLE = "red"


def launch_table(rows: Sequence[TaskRow], steps_per_s: Mapping[str, float], *, most: int) -> Table:
    """At most `most` rows; `steps_per_s` is that of each worker which has one, by short name; shown while it runs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for column, justify in (("task", "left"), ("state", "left"), ("restarts", "right"), ("steps/s", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left", no_wrap=True)
    table.add_column("last line", ratio=1, no_wrap=True, overflow="ellipsis")
    shown = rows if len(rows) <= most else sorted(rows, key=lambda row: row.state in _STYLES)[: most - 1]
    for row in shown:
        style = _STYLES.get(row.state, _TROUBLE)
        rate = steps_per_s.get(row.task) if row.state == "running" else None
        table.add_row(
            row.task,
            Text(row.state, style),
            Text(str(row.restarts or ""), _TROUBLE),
            f"{rate:.1f}" if rate is not None else "",
            Text.from_ansi(row.last_line),
        )
    left_out = Counter(row.state for row in rows if row not in shown)
    if left_out:
        states = ", ".join(f"{count} {state}" for state, count in left_out.most_common())
        table.add_row(f"{left_out.total()} more", Text(states, "dim"))
    return table
