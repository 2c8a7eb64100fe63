"""The server of a task that has joined a cluster, as parameter tasks and workers have one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.processor_use import processor_time
from dflow.distributed.task.task_server import MakePart, TaskServer, TaskSettings
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.lowering.state.store import Store


def joined_server(
    client: CoordinatorClient,
    transport: Transport,
    task: str,
    address: str,
    flights: FlightRecorder,
    parts: Sequence[MakePart],
    *,
    store: Store | None = None,
    settings: TaskSettings | None = None,
) -> TaskServer:
    """Start the server of `task`, listening at `address`, and join by `client`, which is closed after an error.

    `flights`  writes the events of the task to a file when something is stuck here or elsewhere
    """
    client.session.call_on(DumpEvents, lambda notice: flights.dump_soon(notice.why))
    with ExitStack() as undo:
        undo.callback(client.close, "could not join")
        server = TaskServer(
            task,
            transport,
            parts,
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
        for part in server.parts:
            part.follow(client.session)
        client.session.call_on_roster(server.roster_changed)
        client.join(
            task,
            server.address,
            traffic=server.traffic,
            steps=lambda: server.runs.counts.totals().ended,
            doing=server.doing,
            used=processor_time,
        )
        undo.pop_all()
    return server
