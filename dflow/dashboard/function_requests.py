"""Requests to the tasks for their compiled functions, when a page asks for them.

The connections are separate, so that the watch of the cluster does not wait for a slow answer. Lists are kept for
`KEPT_S`, so that many pages cost what one costs. Invariants: one list and at most `MOST_GRAPHS` graphs of all pages are
requested at a time; no lock is held during a call, except by the request for the list, for which others wait at most
`LIST_WAIT_S`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from dflow.dashboard.observing import ClusterObserver, live_tasks
from dflow.distributed.transport.base import Peer, Transport
from dflow.distributed.wire.messages.functions import FunctionRequest, ListFunctions, ListTraces, ReadGraph
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, GraphNameError, TransportClosed

#: Longest time that a list of functions is reused, and longest waits for a task, in s.
KEPT_S, LIST_S, GRAPH_S = 2.0, 2.0, 30.0
#: Most graphs that are requested at a time, and longest wait for the first list that another page has requested, in s.
MOST_GRAPHS, LIST_WAIT_S = 4, 10.0
#: Most tasks that are asked for a list: a job's tasks mostly run the same program.
MOST_TASKS = 64
#: The remedy of a request beyond a limit, and its headers.
_LATER = ("ask again later", {"retry-after": "1"})

Data = dict[str, Any]


class Refusal(Exception):
    """A request that is refused; the arguments are those of `json_error`."""


class FunctionRequests:
    """Asks the tasks of the cluster whose coordinator is at `coordinator`; thread-safe."""

    def __init__(self, transport: Transport, coordinator: str) -> None:
        self._transport, self._coordinator = transport, coordinator
        self._listing, self._graphs = threading.Lock(), threading.BoundedSemaphore(MOST_GRAPHS)
        self._lock = threading.Lock()
        self._observer: ClusterObserver | None = None
        self._pool = ThreadPoolExecutor(8, "dflow dashboard functions")
        self._list: Data = {}
        self._listed_at_s = 0.0

    def functions(self) -> Data:
        """Return the JSON data of the functions of all tasks.

        While another page requests the list, the last one is returned.

        raises  Refusal if there is none within `LIST_WAIT_S`; DflowError if the coordinator does not answer
        """
        if not self._listing.acquire(timeout=0 if self._list else LIST_WAIT_S):
            if self._list:
                return self._list
            raise Refusal(503, "functions: expected a list of them, got none yet", *_LATER)
        try:
            if not self._list or time.monotonic() - self._listed_at_s > KEPT_S:
                self._list = self._ask_all()
                self._listed_at_s = time.monotonic()
            return self._list
        finally:
            self._listing.release()

    def traces(self, task: str, number: int) -> Data:
        """Return the JSON data of the traces of a function.

        raises  GraphNameError for a task or a function that is not there; other DflowErrors if one does not answer
        """
        return {"task": task, "id": number, **_asked(self._peer(task), ListTraces(number), LIST_S)}

    def graph(self, task: str, number: int, trace: int) -> Data:
        """Return the JSON data of the graph of a trace.

        raises  Refusal while `MOST_GRAPHS` others are requested; see also `traces`
        """
        if not self._graphs.acquire(blocking=False):
            raise Refusal(503, f"graphs: expected at most {MOST_GRAPHS} at a time, got one more", *_LATER)
        try:
            return {"task": task, "id": number, **_asked(self._peer(task), ReadGraph(number, trace), GRAPH_S)}
        finally:
            self._graphs.release()

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        if self._observer is not None:
            self._observer.close()

    def _live(self) -> tuple[ClusterObserver, list[TaskInfo]]:
        observer = self._observer or ClusterObserver(self._transport, self._coordinator)
        with self._lock:
            self._observer, spare = self._observer or observer, observer
            observer = self._observer
        if spare is not observer:
            spare.close()  # another request has connected in the meantime
        try:
            return observer, live_tasks(observer.status())
        except (DeadlineExceeded, TransportClosed):
            with self._lock:
                self._observer = None if self._observer is observer else self._observer
            observer.close()
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
            elif bytes(found["functions"]) != b"[]":
                tasks.append({"task": name, **found})
        return {"tasks": tasks, "missing": missing, "tasks_left_out": len(live) - len(asked)}


def _asked(peer: Peer, message: FunctionRequest, timeout_s: float) -> Data:
    """Return a task's answer to a request, whose entries stay as they are in JSON."""
    payload = peer.call(message, timeout_s=timeout_s).payload
    found: Data = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    return found


def _functions_of(observer: ClusterObserver, info: TaskInfo) -> Data | str:
    try:
        return _asked(observer.peer(info, LIST_S), ListFunctions(), LIST_S)
    except (DflowError, OSError, ValueError) as error:
        return str(error)
