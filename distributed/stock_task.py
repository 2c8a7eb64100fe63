"""A task that needs no code of the user's: it holds variables and runs the plans it is sent, until told to stop.

Invariant: it ends by itself when the coordinator is lost, since nobody could find or stop it any more.
"""

from __future__ import annotations

import sys

from dflow.distributed.coordinator_client import CoordinatorClient
from dflow.distributed.membership import STOPPED
from dflow.distributed.stop_signal import StopSignal
from dflow.distributed.task_server import TaskServer
from dflow.distributed.transport.base import Transport
from dflow.tracing.task_name import short_task_name


def serve_task(stop: StopSignal, transport: Transport, task: str, coordinator: str) -> int:
    """Be `task` of the cluster whose coordinator is at that address, until `stop`; returns the exit status.

    raises  DeadlineExceeded when the coordinator is not there; RemoteError when a live task has the name
    """
    client = CoordinatorClient(transport, coordinator, name=task)
    server = TaskServer(task, transport)
    client.call_on_lost(lambda reason: stop.stop(f"the coordinator at {coordinator} is lost: {reason}"))
    client.call_on_roster(server.roster_changed)
    client.join(task, server.address, traffic=server.traffic)
    status, fault = stop.wait_for_exit_status()
    if fault:
        print(f"dflow task {short_task_name(task)}: {fault}", file=sys.stderr)
    client.leave(STOPPED)
    server.close()
    return status
