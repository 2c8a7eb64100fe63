"""The task server process: it runs no user code, holds variables, and runs the plans sent to it until it is stopped.

Invariant: it outlives the coordinator, whose successor finds it unchanged. It ends when there was no coordinator for
`give_up_s`, since no process could find or stop it any more, and when its launcher has ended.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dflow.distributed.client.coordinator_client import LEAVE_S, CoordinatorClient, leave_all
from dflow.distributed.client.coordinator_session import SessionSettings
from dflow.distributed.cluster.joined_server import joined_server, task_metrics
from dflow.distributed.coordinator.membership import STOPPED
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.metrics import MetricsEndpoint
from dflow.distributed.process.dump_signal import dump_on_signal
from dflow.distributed.process.run_folder import run_folder
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.process.termination import STATUS as TERMINATED
from dflow.distributed.snapshots.snapshot_messages import AnnounceLeave
from dflow.distributed.task.task_server import MakePart, TaskSettings
from dflow.distributed.transport.addresses import LOCAL_ADDRESS
from dflow.distributed.transport.base import Transport
from dflow.lowering.programs.program import export_program, load_program
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.values.first_value import first_value
from dflow.lowering.values.wide_types import following_programs
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError
from dflow.tracing.ir.types import ArrayType

LOGGER = logging.getLogger("dflow")

#: Longest wait of a task that SIGTERM ends for a snapshot of its state, in s; many environments kill it 30 s later.
NOTICE_S = 20.0


class StockTask:
    """The task `task` of the cluster whose coordinator is at `coordinator`, listening at `address`.

    Construction joins the cluster; `close` leaves it.

    `parts`      the parts of its server; see `task_role.TASK_PARTS`
    `give_up_s`  longest attempt to reach a lost coordinator, in s
    `snapshots`  folder for its parts of snapshots; None for none
    raises       DeadlineExceeded when the coordinator does not answer; RemoteError when a live task has the name
    """

    def __init__(
        self,
        transport: Transport,
        task: str,
        coordinator: str,
        address: str = LOCAL_ADDRESS,
        *,
        parts: Sequence[MakePart],
        give_up_s: float = SessionSettings.give_up_s,
        snapshots: Path | None = None,
    ) -> None:
        settings = SessionSettings(give_up_s=give_up_s, rejoins_anew=True)
        self.client = CoordinatorClient(transport, coordinator, name=task, settings=settings)
        self.flights = FlightRecorder(task, Recorder(), run_folder(os.environ))
        folder = TaskSettings(snapshots=snapshots)
        self.server = joined_server(self.client, transport, task, address, self.flights, parts, settings=folder)

    def announce_leave(self, stop: StopSignal) -> None:
        """Ask for a snapshot with the state of this task; wait for it, at most `NOTICE_S` or until another signal."""
        name = short_task_name(self.client.task)

        def announce() -> None:
            try:
                self.client.ask(AnnounceLeave(self.client.task), NOTICE_S)
            except DflowError as error:
                LOGGER.warning("%s leaves; steps since the last snapshot are done again: %s", name, error)
            stop.stop("")

        LOGGER.warning("%s was sent SIGTERM, and leaves when its state is saved, or after %g s", name, NOTICE_S)
        threading.Thread(target=announce, name="dflow leave", daemon=True).start()
        stop.wait()

    def close(self) -> None:
        """Leave the cluster and cancel running parts; wait at most `LEAVE_S` for a coordinator that is stopping."""
        self.client.leave(STOPPED, timeout_s=LEAVE_S)
        self.server.close()


@following_programs()
def serve_task(
    stop: StopSignal,
    transport: Transport,
    task: str,
    coordinator: str,
    address: str = LOCAL_ADDRESS,
    *,
    parts: Sequence[MakePart],
    give_up_s: float = SessionSettings.give_up_s,
    metrics: str = "",
    snapshots: Path | None = None,
) -> int:
    """Run a task server until `stop`, with metrics served at `metrics` unless empty; return the exit status.

    It also ends, as by a fault, when the coordinator is lost for `give_up_s`. With `snapshots`, SIGTERM ends it when a
    snapshot has its state, or after `NOTICE_S`, with the status of a process that SIGTERM ended.
    A signal while it joins raises SystemExit with that status.

    raises  what `StockTask` and `MetricsEndpoint` raise
    """
    stock = stop.until_done(
        lambda: StockTask(transport, task, coordinator, address, parts=parts, give_up_s=give_up_s, snapshots=snapshots),
        leave_all,
        0 if snapshots is None else TERMINATED,
    )
    endpoint = MetricsEndpoint(partial(task_metrics, stock.server), metrics) if metrics else None
    if endpoint is not None:
        print(f"dflow task {short_task_name(task)}: metrics are served at {endpoint.address}", flush=True)
    dump_on_signal(stock.flights.dump_soon)
    stock.client.session.call_on_lost(stop.stop)
    # Not a daemon: a process that ends while JAX compiles crashes.
    threading.Thread(target=warm_up, args=(task,), name="dflow warm up").start()
    status, fault = stop.wait_for_exit_status()
    if status == 0 and snapshots is not None:
        stock.announce_leave(stop)
        status = TERMINATED
    if fault:
        print(f"dflow task {short_task_name(task)}: {fault}", file=sys.stderr)
    if endpoint is not None:
        endpoint.close()
    stock.close()
    return status


def warm_up(task: str) -> None:
    """Create a value and load a program, while workers start: the first ones take 0.1 s more, for JAX's own imports.

    An error is only logged.
    """
    scalar = ArrayType(np.dtype("float32"), ())
    try:
        first_value("warm up", scalar, lambda: np.float32(0), None)
        load_program(export_program(lambda value: [value + value], [scalar]), 0)
    except Exception:
        LOGGER.exception("%s: a first program failed", short_task_name(task))
