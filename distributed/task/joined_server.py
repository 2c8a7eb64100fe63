"""The server of a task that has joined a cluster, as parameter tasks and workers have one."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.processor_use import processor_time
from dflow.distributed.task.task_server import TaskServer, TaskSettings
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.pauses import StepsHeld
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
) -> TaskServer:
    """Start the server of `task`, listening at `address`, and join by `client`, which is closed after an error.

    `flights`  writes the events of the task to a file when something is stuck here or elsewhere
    """
    client.session.call_on_dump(flights.dump_soon)
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
        client.session.call_on_hold(partial(_hold_steps, client, server))
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


def _hold_steps(client: CoordinatorClient, server: TaskServer, number: int) -> None:
    """Hold back the shared steps of this task in the pause `number`, or let them begin if that is 0."""
    if number:
        server.gate.close(lambda: client.tell(StepsHeld(server.name, number)))
    else:
        server.gate.open()
