"""Metrics for Prometheus, over HTTP; here those of the coordinator, in `joined_server` those of a task.

Counters are read when a scrape arrives; nothing here slows a step down. Invariant: the number of labels is bounded,
however a program names its queues and however many tasks exist: values beyond the first `MOST_NAMED` are one sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dflow.distributed.observe.step_counts import BOUNDS_S, StepTotals
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.distributed.wire.messages.status import Status
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import Metric

VARIABLE = "DFLOW_METRICS_PORT"
#: At most this many peers, and this many queues and accumulators, have their own label.
MOST_NAMED = 100
OTHERS = "others"


class MetricsEndpoint:
    """Serves the metrics of `collect` at `address` from construction until `close`.

    `collect`  called at each scrape, on a thread of the server
    `address`  a port on 127.0.0.1, or `host:port`; port 0 picks any free one

    raises  ConfigError without the package prometheus_client, and for a malformed address; OSError for a port in use
    """

    def __init__(self, collect: Callable[[], Iterator[Metric]], address: str | int) -> None:
        host, port = metrics_address(address)
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise ConfigError(
                "metrics are served by prometheus_client, which is not installed", "pip install 'dflow[metrics]'"
            ) from error
        registry = CollectorRegistry()
        self.collect = collect
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(
                f"metrics cannot be served at {host}:{port}: {error}; 0 is any free port, and several tasks of one "
                "machine need one each"
            ) from error
        self.address = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def metrics_address(address: str | int) -> tuple[str, int]:
    """Parse `9100`, `0.0.0.0:9100` or a number into host and port; raises ConfigError for anything else."""
    host, _, port = str(address).rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"metrics are to be served at {address!r}; give a port, or host:port, such as 9100")
    return host.strip("[]") or LOOPBACK, int(port)


def coordinator_metrics(status: Status) -> Iterator[Metric]:
    """Yield the metrics of a coordinator with this status."""
    live = [info for info in status.tasks if info.left_at_s is None]
    stalled = sum(health.stalled_since_s is not None for health in status.health)
    tasks = {"live": len(live), "stalled": stalled, "expected": len(status.expected)}
    yield gauge("dflow_tasks", "Tasks by state; those that are stalled are live too.", "state", tasks)
    yield counter("dflow_tasks_left", "Tasks that have left, for whatever reason.", "", {"": status.left})
    yield counter("dflow_run_steps_done", "Steps of all runs that are done.", "", {"": status.steps_done})
    yield gauge("dflow_run_steps", "Steps that all runs have.", "", {"": status.steps_total})
    yield gauge("dflow_variables", "Variables, queues and accumulators.", "", {"": len(status.variables)})
    size = sum(info.size_bytes for info in status.variables)
    yield gauge("dflow_variables_bytes", "What they take, or may come to take.", "", {"": size})
    yield counter("dflow_sent_bytes", "Bytes of values sent.", "", {"": sum(t.size_bytes for t in status.traffic)})
    if (snapshot := status.snapshot) is not None:
        sizes = {"written": snapshot.written_bytes, "full": snapshot.full_bytes}
        yield gauge("dflow_snapshot_bytes", "Bytes of the newest snapshot, and those written for it.", "kind", sizes)


def of_steps(noun: str, text: str, totals: StepTotals) -> Iterator[Metric]:
    """Yield the counts of steps by outcome and by error, and the histogram of their times in s.

    `noun`  "step" or "part", for the names of the metrics
    `text`  what is counted, for their descriptions
    """
    from prometheus_client.core import HistogramMetricFamily

    ended = {"ok": totals.done, "error": sum(totals.errors.values())}
    yield counter(f"dflow_{noun}s", f"The {text} and that have ended, by outcome.", "outcome", ended)
    yield counter(f"dflow_{noun}_errors", f"The {text} and that failed, by error.", "error", totals.errors)
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(totals.buckets), strict=True))
    yield HistogramMetricFamily(f"dflow_{noun}_seconds", f"Time of the {text}.", buckets, totals.total_s)


def counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a counter with `values` by value of `label`; with an empty label, `values` has one entry, of key ""."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family


def gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Return a gauge, like `counter`."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family


def by_short_name(by_task: Mapping[str, int]) -> dict[str, int]:
    """Return the values by the short names of tasks, `bounded`."""
    return bounded({short_task_name(task): size for task, size in by_task.items()})


def bounded(values: Mapping[str, int]) -> dict[str, int]:
    """Return the first `MOST_NAMED` values, and the sum of the others, if there are any, as `OTHERS`."""
    first = dict(itertools.islice(values.items(), MOST_NAMED))
    others = sum(value for name, value in values.items() if name not in first)
    return first | ({OTHERS: others} if len(values) > MOST_NAMED else {})
