"""A task that needs no code of the user's: it holds variables and runs the plans it is sent, until told to stop.

Invariant: it ends by itself when the coordinator is lost, since nobody could find or stop it any more.
"""

from __future__ import annotations

import sys

from dflow.distributed.coordinator_client import CoordinatorClient
from dflow.distributed.membership import STOPPED
from dflow.distributed.stop_signal import StopSignal
from dflow.distributed.task_server import TaskServer
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Transport
from dflow.tracing.task_name import short_task_name


class StockTask:
    """The task `task` of the cluster whose coordinator is at `coordinator`, listening at `address`.

    raises  DeadlineExceeded when the coordinator is not there; RemoteError when a live task has the name
    """

    def __init__(self, transport: Transport, task: str, coordinator: str, address: str = LOCAL_ADDRESS) -> None:
        self.client = CoordinatorClient(transport, coordinator, name=task)
        self.server = TaskServer(task, transport, address=address)
        self.client.call_on_roster(self.server.roster_changed)
        self.client.join(task, self.server.address, traffic=self.server.traffic)

    def close(self) -> None:
        """Leave the cluster and end what runs."""
        self.client.leave(STOPPED)
        self.server.close()


def serve_task(stop: StopSignal, transport: Transport, task: str, coordinator: str, address: str) -> int:
    """Be a stock task until `stop`; returns the exit status. Raises what `StockTask` raises."""
    stock = StockTask(transport, task, coordinator, address)
    stock.client.call_on_lost(lambda reason: stop.stop(f"the coordinator at {coordinator} is lost: {reason}"))
    status, fault = stop.wait_for_exit_status()
    if fault:
        print(f"dflow task {short_task_name(task)}: {fault}", file=sys.stderr)
    stock.close()
    return status
