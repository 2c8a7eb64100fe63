"""`dflow trace --summary`: how the time of a step divides at each task, in tables.

The processor time and the wake-ups are those of the second before the trace, which costs some itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dflow.cli.cost_tables import message_table, step_tables, usage_table
from dflow.cli.live_status import MOST_TASKS
from dflow.dashboard.looks import LOOK_S, look
from dflow.dashboard.observing import ClusterObserver, trace
from dflow.distributed.transport.base import Transport

MOST_EDGES = 30


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

    raises  DeadlineExceeded when no step ends within `timeout_s` seconds
    """
    with closing(ClusterObserver(transport, coordinator)) as observer, ThreadPoolExecutor(16) as pool:
        before = look(observer, pool)
        wait(LOOK_S)
        now = look(observer, pool)
    found, lines = trace(transport, coordinator, path, steps=steps, timeout_s=timeout_s)
    tables = (
        *step_tables(found.step_times()),
        message_table(found.message_times(), most=MOST_EDGES),
        usage_table(before.states, now.states, now.at_s - before.at_s, most=MOST_TASKS),
    )
    for table in tables:
        if table.row_count:
            console.print(table, Text(), sep="\n")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
