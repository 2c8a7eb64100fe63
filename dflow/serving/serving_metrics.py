"""Metrics of a model server for Prometheus.

Invariant: the number of labels is bounded: only served functions have their names as labels, and requests for others
have the label `unknown`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dflow.distributed.observe.metrics import gauge

if TYPE_CHECKING:
    from prometheus_client import Metric

    from dflow.serving.served_model import ServedModel

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
UNKNOWN = "unknown"
_TABLE = ["model", "table"]


class ServingMetrics:
    """Counts and times of requests and batches by function."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "dflow_serve_requests", "Requests by status of HTTP or gRPC.", ["model", "status"], registry=self._registry
        )
        self._seconds = self._histogram("request_seconds", "Time from a request's headers to its answer.", _SECONDS)
        self._waits = self._histogram("queue_seconds", "Wait of a request in its queue.", _SECONDS)
        self._rows = self._histogram("batch_rows", "Rows of a batch, without padding.", _ROWS)
        self._calls = self._histogram("call_seconds", "Time of a batch's computation.", _SECONDS)
        self.models: Mapping[str, ServedModel] = {}
        self._registry.register(self)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(f"dflow_serve_{name}", text, ["model"], buckets=bounds, registry=self._registry)

    def request(self, function: str, status: str, took_s: float) -> None:
        self._requests.labels(function, status).inc()
        self._seconds.labels(function).observe(took_s)

    def batch(self, function: str, rows: int, took_s: float, waits_s: Sequence[float]) -> None:
        """Record a batch; a `BatchObserver`."""
        self._rows.labels(function).observe(rows)
        self._calls.labels(function).observe(took_s)
        waits = self._waits.labels(function)
        for wait_s in waits_s:
            waits.observe(wait_s)

    def collect(self) -> Iterator[Metric]:
        queues = [queue for model in self.models.values() for queue in model.queues]
        waiting = {queue.tensors.name: float(queue.waiting) for queue in queues}
        yield gauge("dflow_serve_waiting_requests", "Requests that wait in a queue.", "model", waiting)
        versions = {name: float(model.current.number) for name, model in self.models.items() if model.current}
        yield gauge("dflow_serve_version", "The version that is served.", "model", versions)
        refused = {name: float(len(model.refused)) for name, model in self.models.items()}
        yield gauge("dflow_serve_refused_versions", "Versions that could not be loaded.", "model", refused)

        yield from self._of_tables()

    def _of_tables(self) -> Iterator[Metric]:
        """The distinct rows of calls, and the rows of the cache, of tables at tasks."""
        served = ((name, model.current) for name, model in self.models.items() if model.current is not None)
        rows = {name: version.rows for name, version in served if version.rows is not None}
        hits = CounterMetricFamily("dflow_serve_table_hits", "Rows from the cache.", labels=_TABLE)
        misses = CounterMetricFamily("dflow_serve_table_misses", "Rows asked of tasks.", labels=_TABLE)
        held = GaugeMetricFamily("dflow_serve_table_rows", "Rows in the cache.", labels=_TABLE)
        oldest = GaugeMetricFamily("dflow_serve_table_oldest_seconds", "Age of the oldest usable row.", labels=_TABLE)
        for model, one in rows.items():
            for table, counts in one.counts.items():
                hits.add_metric([model, table], counts.hits)
                misses.add_metric([model, table], counts.misses)
            for family, values in ((held, one.held), (oldest, one.oldest_s)):
                for table, value in values.items():
                    family.add_metric([model, table], value)
        yield from (hits, misses, held, oldest) if rows else ()

    def text(self) -> bytes:
        return generate_latest(self._registry)
