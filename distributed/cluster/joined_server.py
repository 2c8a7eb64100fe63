"""The server of a task that has joined a cluster, as parameter tasks and workers have one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.processor_use import processor_time
from dflow.distributed.snapshots.task_snapshots import TaskSnapshots
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.message import Notice
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.pauses import HoldSteps, StepsHeld
from dflow.distributed.wire.messages.snapshots import CaptureState, LoadState, SnapshotCommitted
from dflow.lowering.state.store import Store


def joined_server(
    client: CoordinatorClient,
    transport: Transport,
    task: str,
    address: str,
    flights: FlightRecorder,
    *,
    store: Store | None = None,
    settings: TaskSettings | None = None,
    snapshot_folder: Path | None = None,
) -> TaskServer:
    """Start the server of `task`, listening at `address`, and join by `client`, which is closed after an error.

    `flights`          writes the events of the task to a file when something is stuck here or elsewhere
    `snapshot_folder`  folder for the task's parts of snapshots; None where it holds no state of others
    """
    client.session.call_on(DumpEvents, lambda notice: flights.dump_soon(notice.why))
    with ExitStack() as undo:
        undo.callback(client.close, "could not join")
        server = TaskServer(
            task,
            transport,
            process=client.session.process,
            store=store,
            address=address,
            settings=settings,
            flights=flights,
            on_stall=client.ask_for_dumps,
            described=client.describe,
        )
        undo.callback(server.close)
        server.channel.count_from(server.starter.first)
        snapshots = TaskSnapshots(
            task, server.store, server.runs, server.rounds, server.resources, snapshot_folder, client.tell
        )
        follow_coordinator(client.session, server, snapshots.handle)
        client.session.call_on_roster(server.roster_changed)
        client.join(
            task,
            server.address,
            traffic=server.traffic,
            steps=server.steps_ended,
            doing=server.doing,
            used=processor_time,
        )
        undo.pop_all()
    return server


def follow_coordinator(session: SessionDriver, server: TaskServer, handle: Callable[[Notice], None]) -> None:
    """Have the task hold back its steps in pauses, and handle the notices about snapshots on a thread."""
    session.call_on(HoldSteps, partial(_hold_steps, session, server))
    for kind in (CaptureState, LoadState, SnapshotCommitted):
        session.call_on(kind, partial(_handle_on_thread, server, handle))


def _handle_on_thread(server: TaskServer, handle: Callable[[Notice], None], notice: Notice) -> None:
    """Handle a notice on a thread, unless the process is at its end, which begins no calls on threads."""
    try:
        server.threads.submit(handle, notice)
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise


def _hold_steps(session: SessionDriver, server: TaskServer, notice: HoldSteps) -> None:
    """Hold back the shared steps of this task in a pause, or let them begin if none is on."""
    if notice.number:
        server.gate.close(lambda: session.tell(StepsHeld(server.name, notice.number)))
        if notice.is_for_return:
            server.runs.end_blocked("all tasks return to a snapshot")
    else:
        server.gate.open()
