"""The end of a run on one screen: results, a row for each task, the largest variables and transfers.

`closing_tables` in `status_view.py` shows the same in full, for `--all-tables`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dflow.cli.status_view import ends_of_tasks, time_and_metrics, variables_total
from dflow.cli.tables import make_table, size_text
from dflow.dashboard.looks import largest_first, type_text
from dflow.dashboard.traffic import grouped_traffic
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.wire.messages.status import Status, WorkerProgress
from dflow.tracing.devices.task_name import short_task_name

#: Most rows of the table of tasks; one more row counts the others by their end.
MOST_TASKS = 12
#: Number of variables, and of edges between tasks, that are named.
LARGEST = 2


def closing_summary(status: Status, ends: Mapping[str, str]) -> RenderableType:
    """Return the summary shown at the end of a run. `ends` tells how each process ended, by full task name."""
    table = _tasks_table(status, ends)
    return Group(Text(), *_results(status), *([table] if table.row_count else []), *_largest(status))


def _results(status: Status) -> Iterator[Text]:
    if status.results:
        yield _line("Results", "; ".join(f"{name} {value:.6g}" for name, value in status.results.items()))
    for one in status.not_finite:
        where = f"{one.metric} {one.value} in {one.run}, first at step {one.step} on {short_task_name(one.task)}"
        yield _line("Not finite", where)
    if status.steps_total:
        yield _line("Steps", f"{status.steps_done} of {status.steps_total}")


def _tasks_table(status: Status, ends: Mapping[str, str]) -> Table:
    """Return a row for each task; if there are too many, tasks that neither live nor finished come first."""
    workers = {worker.task: worker for worker in status.workers}
    columns = ("task", ">joined", ">left", "end", *((">steps", ">step time", "metrics") if workers else ()))
    table = make_table("", *columns)
    rows = ends_of_tasks(status, ends)
    processes = Counter(row.task for row in rows)
    if len(rows) > MOST_TASKS:
        rows.sort(key=lambda row: row.why in (FINISHED, "live"))
    for row in rows[:MOST_TASKS]:
        cells: list[RenderableType] = [short_task_name(row.task), row.joined, row.left, Text(row.why)]
        if row.is_newest and (worker := workers.get(row.task)) is not None:
            cells += [_steps(worker, is_again=processes[row.task] > 1), *time_and_metrics(worker)]
        table.add_row(*cells)
    if rest := Counter(row.why for row in rows[MOST_TASKS:]):
        table.add_row(f"{rest.total()} more", "", "", ", ".join(f"{n} {why}" for why, n in rest.most_common(3)))
    return table


def _steps(worker: WorkerProgress, *, is_again: bool) -> str:
    """Return the number of steps of a worker, which is that of all its processes if it was started again."""
    dropped = f" ({worker.dropped} dropped)" if worker.dropped else ""
    return f"{worker.steps}{dropped}{' in all' if is_again else ''}"


def _largest(status: Status) -> Iterator[Text]:
    if variables := largest_first(status.variables):
        named = (f"{one.name} {type_text(one)} {size_text(one.size_bytes)}" for one in variables)
        rows = [f"{text} on {short_task_name(one.task)}" for text, one in zip(named, variables, strict=True)]
        yield _line("Variables", variables_total(variables, status.snapshot), rows)
    edges = grouped_traffic(status.traffic)
    if edges:
        total = size_text(sum(row.size_bytes for row in edges))
        rows = [f"{row.edge} {row.source} -> {row.destination} {size_text(row.size_bytes)}" for row in edges]
        yield _line("Sent", total, rows)


def _line(title: str, text: str, largest: Sequence[str] = ()) -> Text:
    """Return a line with a bold title, and after its text the first `LARGEST` of a list."""
    named = f"; largest: {'; '.join(largest[:LARGEST])}" if largest else ""
    more = "; ... (--all-tables)" if len(largest) > LARGEST else ""
    return Text.assemble((f"{title}: ", "bold"), text, named, more)
