"""The metrics of one task, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflow.distributed.observe.metrics import bounded, by_short_name, counter, gauge, of_steps
from dflow.distributed.task.task_server import TaskServer
from dflow.tracing.devices.task_name import short_task_name

if TYPE_CHECKING:
    from prometheus_client import Metric


def task_metrics(server: TaskServer) -> Iterator[Metric]:
    """Collect the metrics of one task."""
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
