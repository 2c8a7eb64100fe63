"""The server of a task that has joined a cluster, as parameter tasks and workers have one, and its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.observe.flight_recorder import FlightRecorder
from dflow.distributed.observe.metrics import bounded, by_short_name, counter, gauge, of_steps
from dflow.distributed.observe.processor_use import processor_time
from dflow.distributed.task.task_server import MakePart, TaskServer, TaskSettings
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.lowering.state.store import Store
from dflow.tracing.devices.task_name import short_task_name

if TYPE_CHECKING:
    from prometheus_client import Metric


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


def task_metrics(server: TaskServer) -> Iterator[Metric]:
    """Yield the metrics of one task, as they are now."""
    from prometheus_client.core import InfoMetricFamily

    yield InfoMetricFamily("dflow_task", "Which task this is.", {"task": short_task_name(server.name)})
    yield from of_steps("step", "steps that this task started", server.step_counts.totals())
    yield from of_steps("part", "parts of steps that this task ran", server.runs.counts.totals())
    sent: dict[str, int] = {}
    for entry in server.traffic():
        sent[entry.destination] = sent.get(entry.destination, 0) + entry.size_bytes
    yield counter("dflow_sent_bytes", "Bytes of values sent, by peer.", "peer", by_short_name(sent))
    yield counter(
        "dflow_received_bytes", "Bytes of values received, by peer.", "peer", by_short_name(server.channel.taken_in())
    )
    state = server.state()
    for name, text, number in (
        ("dflow_running_parts", "Parts of steps that run now.", state.running),
        ("dflow_values_waited_for", "Values that are waited for now.", state.waiting),
        ("dflow_values_held", "Values that came and nobody has taken yet.", state.held),
        ("dflow_connections", "Open connections to other tasks.", server.peers.open_connections()),
    ):
        yield gauge(name, text, "", {"": number})
    depths = {depth.name: depth.size for depth in state.depths}
    text = "Elements in each queue, gradients in each accumulator."
    yield gauge("dflow_resource_depth", text, "resource", bounded(depths))
