"""`dflow trace` and `dflow dump`: requests to each task of a running cluster, over separate connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.observe.tracer import Trace, Tracer
from dflow.distributed.transport.base import Peer, RefuseAll, Transport
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DflowError

#: Name of the observing tools towards tasks; with certificates, their certificate must be for this name.
TOOL = "status"
CONNECT_S = 5.0
ANSWER_S = 30.0


@contextlib.contextmanager
def live_tasks(transport: Transport, coordinator: str) -> Iterator[tuple[dict[str, Peer], dict[str, str]]]:
    """Connect to all live tasks; yield the peers, and for each task not reached the reason, by full task name.

    raises  DeadlineExceeded when the coordinator does not answer
    """
    client = CoordinatorClient(transport, coordinator, name=TOOL, timeout_s=CONNECT_S)
    try:
        tasks = [info for info in client.ask(GetStatus(), CONNECT_S).tasks if info.left_at_s is None]
    finally:
        client.close()
    reached: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    with ExitStack() as connections:
        for info in sorted(tasks, key=lambda info: split_task_name(info.task)):
            try:
                peer = transport.connect(
                    info.address, name=TOOL, handler=RefuseAll(), who=short_task_name(info.task), timeout_s=CONNECT_S
                )
            except (DflowError, OSError) as error:
                missing[info.task] = str(error)
            else:
                connections.callback(peer.close)
                reached[info.task] = peer
        yield reached, missing


def trace(transport: Transport, coordinator: str, path: Path, *, steps: int, timeout_s: float) -> list[str]:
    """Write the next `steps` steps of each worker to `path`; return a summary in lines.

    raises  DeadlineExceeded when no step ends within `timeout_s` seconds
    """
    with live_tasks(transport, coordinator) as (reached, missing):
        tracer = Tracer(reached, longest_s=timeout_s + ANSWER_S)
        try:
            tracer.wait_for_steps(steps, timeout_s)
        finally:
            found = tracer.stop(steps)
    found.write(path)
    return [*_said_of(found, path), *(f"without {short_task_name(task)}: {why}" for task, why in missing.items())]


def dump(transport: Transport, coordinator: str) -> list[str]:
    """Have each live task write its last events to a file; return a line per task with the path."""
    lines = []
    with live_tasks(transport, coordinator) as (reached, missing):
        pending = {task: peer.start(DumpEvents("dflow dump")) for task, peer in reached.items()}
        for task, reply in pending.items():
            try:
                path = reply.wait(ANSWER_S).message.path
            except DflowError as error:
                missing[task] = str(error)
                continue
            lines.append(f"{short_task_name(task)}  {path or 'could not write: see its log'}")
    return lines + [f"{short_task_name(task)}  not reached: {why}" for task, why in missing.items()]


def _said_of(found: Trace, path: Path) -> list[str]:
    worst_us = max((offset.error_ns for offset in found.offsets.values()), default=0) / 1e3
    shown = f"{path}: {found.steps} steps of {len(found.events)} tasks, clocks aligned to {worst_us:.0f} us"
    lines = [f"{shown}; open it at https://ui.perfetto.dev"]
    lines += [f"the first events of {short_task_name(task)} were lost, there were so many" for task in found.lost]
    return lines + [f"without {short_task_name(task)}: {why}" for task, why in found.missing.items()]
