"""Requests to the tasks for their compiled functions, when a page asks for them.

Invariant: one request of all pages is under way at a time, over separate connections, so that the watch of the
cluster does not wait for a slow answer. Lists are kept for `KEPT_S`, so that many pages cost what one costs.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from msgspec.structs import asdict

from dflow.dashboard.observing import ClusterObserver, live_tasks
from dflow.distributed.transport.base import Peer, Transport
from dflow.distributed.wire.messages.functions import Functions, ListFunctions, ListTraces, ReadGraph
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, GraphNameError, TransportClosed

#: Longest time that a list of functions is reused, and longest waits for a task, in s.
KEPT_S, LIST_S, GRAPH_S = 2.0, 2.0, 30.0
#: Most tasks that are asked for a list: a job's tasks mostly run the same program.
MOST_TASKS = 64

Data = dict[str, Any]


class FunctionRequests:
    """Asks the tasks of the cluster whose coordinator is at `coordinator`; thread-safe."""

    def __init__(self, transport: Transport, coordinator: str) -> None:
        self._transport, self._coordinator = transport, coordinator
        self._lock = threading.Lock()
        self._observer: ClusterObserver | None = None
        self._pool = ThreadPoolExecutor(8, "dflow dashboard functions")
        self._list: Data = {}
        self._listed_at_s = 0.0

    def functions(self) -> Data:
        """Return the JSON data of the functions of all tasks. Raises DflowError if the coordinator does not answer."""
        with self._lock:
            if not self._list or time.monotonic() - self._listed_at_s > KEPT_S:
                self._list = self._ask_all()
                self._listed_at_s = time.monotonic()
            return self._list

    def traces(self, task: str, number: int) -> Data:
        """Return the JSON data of the traces of a function.

        raises  GraphNameError for a task or a function that is not there; other DflowErrors if one does not answer
        """
        with self._lock:
            found = self._peer(task).call(ListTraces(number), timeout_s=LIST_S).message
            records = [asdict(record) for record in found.records]
            return {"task": task, "id": number, "name": found.name, "records": records, "left_out": found.left_out}

    def graph(self, task: str, number: int, trace: int) -> tuple[Data, bytes]:
        """Return the head of the answer as JSON data, and the graph as JSON text; see `traces`."""
        with self._lock:
            found = self._peer(task).call(ReadGraph(number, trace), timeout_s=GRAPH_S)
            head = {"task": task, "id": number, "trace": found.message.trace, "name": found.message.name}
            return head, bytes(found.payload)

    def close(self) -> None:
        """Close the connections."""
        self._pool.shutdown(wait=True)
        if self._observer is not None:
            self._observer.close()

    def _live(self) -> tuple[ClusterObserver, list[TaskInfo]]:
        try:
            if self._observer is None:
                self._observer = ClusterObserver(self._transport, self._coordinator)
            return self._observer, live_tasks(self._observer.status())
        except (DeadlineExceeded, TransportClosed):
            if self._observer is not None:
                self._observer.close()
                self._observer = None
            raise

    def _peer(self, task: str) -> Peer:
        observer, live = self._live()
        info = next((info for info in live if short_task_name(info.task) == task), None)
        if info is None:
            there = ", ".join(short_task_name(info.task) for info in live[:MOST_TASKS])
            raise GraphNameError(f"task: expected a live one ({there or 'none now'}), got {task!r}")
        return observer.peer(info, LIST_S)

    def _ask_all(self) -> Data:
        observer, live = self._live()
        asked = live[:MOST_TASKS]
        tasks, missing = [], {}
        for info, found in zip(asked, self._pool.map(partial(_functions_of, observer), asked), strict=True):
            name = short_task_name(info.task)
            if isinstance(found, str):
                missing[name] = found
            elif found.functions:
                functions = [asdict(one) for one in found.functions]
                tasks.append({"task": name, "functions": functions, "left_out": found.left_out})
        return {"tasks": tasks, "missing": missing, "tasks_left_out": len(live) - len(asked)}


def _functions_of(observer: ClusterObserver, info: TaskInfo) -> Functions | str:
    try:
        return observer.peer(info, LIST_S).call(ListFunctions(), timeout_s=LIST_S).message
    except (DflowError, OSError, ValueError) as error:
        return str(error)
