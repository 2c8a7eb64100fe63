"""Connections of tools that observe a running cluster; `dflow trace` and `dflow dump`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.observe.tracer import Trace, Tracer
from dflow.distributed.transport.base import Handler, Peer, Transport
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import ClusterEvents, GetEvents, GetStatus, Status
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DflowError

#: Name of the observing tools towards tasks; with certificates, their certificate must be for this name.
TOOL = "status"
CONNECT_S = 5.0
ANSWER_S = 30.0


class ClusterObserver:
    """Connections to the coordinator and to tasks of its cluster.

    raises  DeadlineExceeded when the coordinator does not answer
    """

    def __init__(self, transport: Transport, coordinator: str) -> None:
        self._transport = transport
        self._client = CoordinatorClient(transport, coordinator, name=TOOL, timeout_s=CONNECT_S)
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[str, Peer]] = {}

    def status(self) -> Status:
        return self._client.ask(GetStatus(), CONNECT_S)

    def events(self, since: int, start: str) -> ClusterEvents:
        """Return the coordinator's events after number `since` of its `start`; see `GetEvents`."""
        return self._client.ask(GetEvents(since, start), CONNECT_S)

    def peer(self, info: TaskInfo, timeout_s: float = CONNECT_S) -> Peer:
        """Return the connection to a task, which is made if there is none. Raises DflowError or OSError if it fails."""
        address, peer = self._peers.get(info.task, ("", None))
        if peer is None or peer.closed or address != info.address:
            who = short_task_name(info.task)
            peer = self._transport.connect(info.address, name=TOOL, handler=Handler(), who=who, timeout_s=timeout_s)
            with self._lock:
                other_address, other = self._peers.get(info.task, ("", None))
                if other is None or other.closed or other_address != info.address:
                    self._peers[info.task] = (info.address, peer)
                    return peer
            peer.close()  # another thread has connected in the meantime
            peer = other
        return peer

    def close(self) -> None:
        for _, peer in self._peers.values():
            peer.close()
        self._client.close()


def live_tasks(status: Status) -> list[TaskInfo]:
    """Return the tasks that have not left, by name."""
    return sorted(
        (info for info in status.tasks if info.left_at_s is None), key=lambda info: split_task_name(info.task)
    )


def is_up(transport: Transport, coordinator: str, task: str) -> bool:
    """Whether the coordinator answers and, if `task` is the short name of another one, lists it with a connection.

    raises  DeadlineExceeded when the coordinator does not answer
    """
    with contextlib.closing(ClusterObserver(transport, coordinator)) as observer:
        status = observer.status()
    up = {short_task_name(info.task) for info in live_tasks(status) if info.task not in status.away}
    return task == COORDINATOR or task in up


@contextlib.contextmanager
def live_peers(transport: Transport, coordinator: str) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """Connect to all live tasks; yield the peers, and for each task not reached the reason, by full task name.

    raises  DeadlineExceeded when the coordinator does not answer
    """
    reached: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    with contextlib.closing(ClusterObserver(transport, coordinator)) as observer:
        for info in live_tasks(observer.status()):
            try:
                reached[info.task] = observer.peer(info)
            except (DflowError, OSError) as error:
                missing[info.task] = str(error)
        yield reached, missing


def trace(
    transport: Transport, coordinator: str, path: Path | None, *, steps: int, timeout_s: float
) -> tuple[Trace, list[str]]:
    """Trace the next `steps` steps of each worker, and write them to `path` unless it is None; also return lines on it.

    raises  DeadlineExceeded when no step ends within `timeout_s` seconds
    """
    with live_peers(transport, coordinator) as (reached, missing):
        tracer = Tracer(reached, longest_s=timeout_s + ANSWER_S)
        try:
            tracer.wait_for_steps(steps, timeout_s)
        finally:
            found = tracer.stop(steps)
    worst_us = max((offset.error_ns for offset in found.offsets.values()), default=0) / 1e3
    shown = f"{found.steps} steps of {len(found.events)} tasks, clocks aligned to {worst_us:.0f} us"
    if path is not None:
        found.write(path)
        shown = f"{path}: {shown}; open it at https://ui.perfetto.dev"
    lost = (f"the first events of {short_task_name(task)} were overwritten by later ones" for task in found.lost)
    without = (f"without {short_task_name(task)}: {why}" for task, why in [*found.missing.items(), *missing.items()])
    return found, [shown, *lost, *without]


def dump(transport: Transport, coordinator: str) -> list[str]:
    """Have each live task write its last events to a file; return a line per task with the path."""
    lines = []
    with live_peers(transport, coordinator) as (reached, missing):
        pending = {task: peer.start(DumpEvents("dflow dump")) for task, peer in reached.items()}
        for task, reply in pending.items():
            try:
                path = reply.wait(ANSWER_S).message.path
            except DflowError as error:
                missing[task] = str(error)
                continue
            lines.append(f"{short_task_name(task)}  {path or 'could not write: see its log'}")
    return lines + [f"{short_task_name(task)}  not reached: {why}" for task, why in missing.items()]
