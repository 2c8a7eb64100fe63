"""How many requests a second `dflow serve` answers with its table here, at tasks, and at tasks with a cache of rows.

A table in two shards and a dense layer score rows of 16 ids, which clients draw by Zipf's law, so that few ids are in
most requests. One export is served with the table in the server, and with the table at two tasks of a cluster, without
a cache and with one of a tenth and a hundredth of the rows. The servers run at the same time, and are loaded one after
the other by clients on the same cores, as `benchmarks.serving` has them. `ratio` is the median of the requests/s over
those of the server that has the table, in the same round; `hits` is the share of rows that came from the cache.

Then a worker trains the same table at two other tasks, by `Async`, and a server looks its rows up there as they change,
with a cache of a tenth of the rows whose age is at most `AGE_S`. `examples/s` is the speed of the training beside that
server: paused, asked for nothing, and loaded by the clients; `training` is its ratio to the first, in the same round.
"""

from __future__ import annotations

import re
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._paired import in_turn, median_ratio, options, publish
from benchmarks._serving_load import answer_of, load, port_of, request_of, row, running
from dflow.dashboard.observing import ClusterObserver
from dflow.distributed.transport.sockets import SocketTransport

#: Ids in a request, and columns of the table.
IN_ROW, COLUMNS = 16, 32
#: Requests that a client repeats, and the exponent of Zipf's law.
REQUESTS, EXPONENT = 256, 1.2
HERE = "in the server"
#: Most age of a row of a table that is trained, in s, and examples of a step that trains it.
AGE_S, BATCH = 1, 1024
TRAINING = f"""
import numpy as np, optax, dflow
cluster = dflow.connect()
with cluster.parameter_servers():
    table = dflow.Embedding(ROWS, {COLUMNS}, name="table", shards=2)
    optimizer = dflow.Optimizer(optax.adagrad(0.01), [table], name="optimizer")

@dflow.jit
def step(ids):
    value, gradients = dflow.value_and_grad(lambda: (table(ids) ** 2).sum(), [table])()
    optimizer.apply(gradients)
    return value

drawn = np.random.default_rng(2).zipf({EXPONENT}, (64, {BATCH})) % ROWS
batches = ((drawn[step % 64].astype(np.int32),) for step in range(10**9))
for _ in dflow.distributed.Async(cluster).run(step, batches, steps=10**9):
    pass
"""


def export(path: Path, rows: int) -> None:
    table = dflow.Embedding(rows, COLUMNS, name="table", shards=2)
    layer = dflow.Variable(jnp.ones(COLUMNS), name="layer")

    def score(ids: Any) -> Any:
        return table.bag(ids) @ layer

    dflow.export(score, dflow.spec(f"b, {IN_ROW}", jnp.int32), platforms=["cpu"]).save(path)


def requests_of(ids: Any) -> list[bytes]:
    """Return requests with a row of these ids each."""
    tensor = {"name": "ids", "shape": [1, IN_ROW], "datatype": "INT32"}
    return [request_of("binary", "model", tensor, one.tobytes(), ()) for one in ids]


def command(stack: ExitStack, *words: str) -> Any:
    return stack.enter_context(running(sys.executable, "-m", "dflow", *words))


def tasks_of(stack: ExitStack, *jobs: str) -> str:
    """Start a coordinator that expects these jobs, and two tasks; return its address."""
    expected = [word for job in ("ps=2", *jobs) for word in ("--job", job)]
    coordinator = command(stack, "coordinator", *expected, "--address", "127.0.0.1:0")
    address = f"127.0.0.1:{port_of(coordinator, 'on ')}"
    for index in range(2):
        command(stack, "task", "--index", str(index), "--coordinator", address)
    return address


def started(stack: ExitStack, path: Path, rows: int) -> Iterator[tuple[str, int]]:
    """Start two tasks and the servers; yield the name and the port of each server."""
    address = tasks_of(stack)
    at_tasks = ("--tables", address)
    ways = {
        HERE: (),
        "at tasks": at_tasks,
        **{f"at tasks, 1/{part} cached": (*at_tasks, "--cache-rows", str(rows // part)) for part in (100, 10)},
    }
    for name, words in ways.items():
        yield name, port_of(command(stack, "serve", str(path), "--address", "127.0.0.1:0", *words))


def beside_training(path: Path, rows: int, seconds: float, requests: list[list[bytes]], rounds: int) -> list[Any]:
    """Return the figures of a job that trains without and with a server beside it, and those of the server."""
    with ExitStack() as stack:
        address = tasks_of(stack, "worker=1")
        where = {"DFLOW_COORDINATOR": address, "DFLOW_JOB": "worker", "DFLOW_INDEX": "0"}
        stack.enter_context(running(sys.executable, "-c", TRAINING.replace("ROWS", str(rows)), **where))
        transport = SocketTransport()
        observer = stack.enter_context(closing(ClusterObserver(transport, address)))
        while observer.status().steps_done < 10:
            time.sleep(0.1)

        def rate_beside(do: Callable[[], Any]) -> tuple[float, Any]:
            began, before = time.monotonic(), observer.status().steps_done
            found = do()
            steps, took_s = observer.status().steps_done - before, time.monotonic() - began
            return BATCH * steps / took_s, found

        words = ("--tables", address, "--cache-rows", str(rows // 10), "--max-age", str(AGE_S))
        server = command(stack, "serve", str(path), "--address", "127.0.0.1:0", *words)
        port = port_of(server)
        answer_of(port, "binary", requests[0][0])

        def alone() -> tuple[float, Any]:
            server.send_signal(signal.SIGSTOP)
            try:
                return rate_beside(lambda: time.sleep(seconds))
            finally:
                server.send_signal(signal.SIGCONT)

        ways: dict[str, Callable[[], tuple[float, Any]]] = {
            "alone": alone,
            "idle": lambda: rate_beside(lambda: time.sleep(seconds)),
            "loaded": lambda: rate_beside(lambda: load(port, "binary", requests, seconds)),
        }
        measured, hits = in_turn(ways, rounds), hits_of(port)
    rates = {name: [one[0] for one in found] for name, found in measured.items()}
    figures = {
        name: {
            "examples/s": statistics.median(own),
            "training": median_ratio(own, rates["alone"])[0],
        }
        for name, own in rates.items()
    }
    return [
        {"server": "of a job, paused", **figures["alone"]},
        {"server": "of a job, asked for nothing", **figures["idle"]},
        row("of a job, 1/10 cached|binary", [one[1] for one in measured["loaded"]], seconds)
        | {"hits": hits, **figures["loaded"]},
    ]


def hits_of(port: int) -> float:
    """Return the share of rows that came from the cache; NaN for a table in the server."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = dict(re.findall(r"^dflow_serve_table_(\w+)_total\{.*?\} (\S+)$", text, re.MULTILINE))
    counts = [float(found.get(name, 0)) for name in ("hits", "misses")]
    return counts[0] / sum(counts) if sum(counts) else float("nan")


def main() -> None:
    given = options(__doc__, rounds=3, clients=16, milliseconds=3000, rows=1_000_000)
    seconds = given.milliseconds / 1e3
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        export(path, given.rows)
        ports = dict(started(stack, path, given.rows))
        drawn = np.random.default_rng(1).zipf(EXPONENT, (given.clients, REQUESTS, IN_ROW)) % given.rows
        requests = [requests_of(own) for own in drawn.astype(np.int32)]
        answers = [answer_of(port, "binary", requests[0][0]) for port in ports.values()]
        scores = [float(np.frombuffer(answer[-4:], np.float32)[0]) for answer in answers]
        np.testing.assert_allclose(scores, scores[0], rtol=1e-6)
        ways = {name: lambda port=port: load(port, "binary", requests, seconds) for name, port in ports.items()}
        measured = in_turn(ways, given.rounds)
        hits = {name: hits_of(port) for name, port in ports.items()}
        trained = beside_training(path, given.rows, seconds, requests, given.rounds)
    rates = {name: [len(one.times_s) for one in loads] for name, loads in measured.items()}
    publish(
        "serving_tables",
        [
            row(f"{name}|binary", loads, seconds)
            | {"ratio": median_ratio(rates[name], rates[HERE])[0], "hits": hits[name]}
            for name, loads in measured.items()
        ]
        + trained,
        as_json=given.json,
    )


if __name__ == "__main__":
    main()
