"""Measure the effect of a dashboard, and of pages that look at it, on the steps of a cluster.

A launched cluster does steps of a small model all the time. Of it are measured, interleaved, windows without a
dashboard, with one, and with one that 20 pages are open on; each page is a client that reads the stream of updates. The
dashboard and the clients use the same cores as the cluster: *dashboard cores* and *clients cores* are what they used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks._launched import launch
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._watched import Watched
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import GetStatus

WAIT_S = 120.0
PAGES = 20


class Window(NamedTuple):
    """The time of a step in a window, in s, and the cores that the dashboard and the clients used."""

    step_s: float
    dashboard: float
    clients: float


def main() -> None:
    given = options(__doc__, rounds=7, seconds=4)
    words, environment = launch("dashboard.py", (), ps=1, workers=1)
    with Watched(words, environment) as cluster:
        coordinator = cluster.wait_for("--coordinator ", WAIT_S).text.rpartition(" ")[2]
        client = CoordinatorClient(SocketTransport(), coordinator, name="benchmark", timeout_s=WAIT_S)
        with contextlib.closing(client):
            wait_for_steps(client)
            measure = partial(window, client, coordinator, given.seconds)
            ways = {"without": None, "dashboard": 0, f"{PAGES} pages": PAGES}
            found = in_turn({name: partial(measure, pages) for name, pages in ways.items()}, given.rounds)
    base = [one.step_s for one in found["without"]]
    rows = []
    for name, windows in found.items():
        ratio, low, high = median_ratio([one.step_s for one in windows], base)
        row = {"cluster": name, "steps/s": statistics.median(1 / one.step_s for one in windows)}
        row |= {"time of a step": ratio, "10 %": low, "90 %": high}
        row |= {"dashboard cores": statistics.median(one.dashboard for one in windows)}
        rows.append(row | {"clients cores": statistics.median(one.clients for one in windows)})
    publish("dashboard", rows, as_json=given.json)


def window(client: CoordinatorClient, coordinator: str, seconds: float, pages: int | None) -> Window:
    """Measure for some seconds, with a dashboard and pages, or without if `pages` is None."""
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(dashboard(coordinator, pages)) if pages is not None else None
        used, before, began_s = (processor_s(pid), time.process_time()), steps(client), time.perf_counter()
        time.sleep(seconds)
        took_s, done = time.perf_counter() - began_s, steps(client) - before
        shares = (processor_s(pid) - used[0], time.process_time() - used[1])
        return Window(took_s / done, shares[0] / took_s, shares[1] / took_s)


@contextlib.contextmanager
def dashboard(coordinator: str, pages: int) -> Iterator[int]:
    words = [sys.executable, "-m", "dflow", "dashboard", "--coordinator", coordinator]
    with Watched(words, os.environ) as process:
        address = urlsplit(process.wait_for("dflow dashboard: ", WAIT_S).text.rpartition(" ")[2])
        assert address.hostname is not None
        connections = [HTTPConnection(address.hostname, address.port, timeout=WAIT_S) for _ in range(pages)]
        ready = threading.Barrier(pages + 1)
        threads = [threading.Thread(target=read, args=(each, ready)) for each in connections]
        for thread in threads:
            thread.start()
        ready.wait(WAIT_S)
        try:
            yield process.process.pid
        finally:
            process.process.terminate()  # which ends the streams
            for thread in threads:
                thread.join()


def read(connection: HTTPConnection, ready: threading.Barrier) -> None:
    """Read the stream of updates until it ends; the first one makes the page ready."""
    connection.request("GET", "/api/stream")
    response = connection.getresponse()
    response.readline()
    ready.wait(WAIT_S)
    while response.readline():
        pass
    connection.close()


def processor_s(pid: int | None) -> float:
    """Return the processor time that a process has used, in s."""
    if pid is None:
        return 0.0
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def steps(client: CoordinatorClient) -> int:
    return client.ask(GetStatus(), WAIT_S).steps_done


def wait_for_steps(client: CoordinatorClient) -> None:
    deadline = time.monotonic() + WAIT_S
    while steps(client) < 50:
        assert time.monotonic() < deadline, "the cluster has done no steps"
        time.sleep(0.1)


def work() -> None:
    """Do steps until this process is ended, as a worker."""
    import jax.numpy as jnp

    import dflow

    cluster = dflow.connect()
    with cluster.parameter_servers():
        w = dflow.Variable(lambda: jnp.ones((256, 256)), name="w")

    @dflow.jit
    def train_step(x: jnp.ndarray) -> jnp.ndarray:
        y = jnp.tanh(x @ w.read())
        w.assign_sub(1e-3 * (x.T @ y))
        return (y**2).mean()

    batches = itertools.repeat((jnp.ones((32, 256)),))
    for _ in dflow.distributed.Async(cluster).run(train_step, batches, steps=10**9):
        pass


if __name__ == "__main__":
    if "DFLOW_JOB" in os.environ:
        work()
    else:
        main()
