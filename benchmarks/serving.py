"""How many requests a second `dflow serve` answers over HTTP and gRPC, and how late, beside others.

One model, a small classifier, is exported once, and served by

- `dflow`: `dflow serve`, each request alone; and with batches of at most 16 rows
- `by hand`: the program called by `jax.export` in a starlette app of 15 lines, which takes raw numbers
- `MLServer`: the same program in a custom runtime, if `--mlserver` names its command, of an environment that has JAX

All servers run at the same time, and are loaded one after the other; `--alone` runs the one with batches. The clients
are threads of one process, each with one kept connection, that send a row and wait for the answer. They run on the same
cores as the server. Those of HTTP are sockets that send prepared bytes; those of gRPC use `grpcio`, which takes more of
the cores: `client, us` is the clients' processor time for a request. Then the server with batches is loaded again while
every second client sends bad requests, and its memory is read before and after.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import jax
import jax.numpy as jnp
import numpy as np

import dflow
from benchmarks._paired import in_turn, options, publish
from dflow.serving.grpc_messages import MESSAGES, SERVICE

START_S = 120.0
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """Times of requests, sorted; the number of answers by status of HTTP; and the processor time of the clients."""

    times_s: list[float]
    statuses: Counter[int]
    client_s: float


def export_classifier(path: Path, width: int) -> None:
    """Write a classifier of 784 inputs with one hidden layer, and its variables beside it."""
    random = np.random.default_rng(0)
    values = {
        "first": np.float32(random.normal(size=(784, width)) / 28),
        "second": np.float32(random.normal(size=(width, 10)) / width**0.5),
    }
    first, second = (dflow.Variable(jnp.asarray(value), name=name) for name, value in values.items())

    def classify(x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jax.nn.relu(x @ first) @ second)

    dflow.export(classify, dflow.spec("b, 784", jnp.float32)).save(path)
    np.savez(path.parent / "values.npz", **values)


def request_of(form: str, *, is_bad: bool = False) -> bytes:
    """Return the bytes of a request for one row: `raw`, in the protocol's `binary` form, in `JSON`, or by `gRPC`."""
    row = np.random.default_rng(1).normal(size=784).astype(np.float32)
    x: dict[str, Any] = {"name": "y" if is_bad else "x", "shape": [1, 784], "datatype": "FP32"}
    if form == "gRPC":
        message = MESSAGES["ModelInferRequest"](model_name="model", inputs=[x], raw_input_contents=[row.tobytes()])
        return bytes(message.SerializeToString())
    body, extra = row.tobytes(), ""
    if form == "binary":
        x["parameters"] = {"binary_data_size": row.nbytes}
        head = json.dumps({"inputs": [x], "parameters": {"binary_data_output": True}}).encode()
        body, extra = head + body, f"Inference-Header-Content-Length: {len(head)}\r\n"
    if form == "JSON":
        body = json.dumps({"inputs": [x | {"data": row.tolist()}]}).encode()
    kind = "application/json" if form == "JSON" else "application/octet-stream"
    head_lines = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head_lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def exchange(connection: socket.socket, request: bytes) -> int:
    """Send a request, read its answer, and return the status."""
    connection.sendall(request)
    answer = b""
    while (end := answer.find(b"\r\n\r\n")) < 0:
        answer += connection.recv(1 << 16) or lost()
    found = LENGTH.search(answer, 0, end)
    missing = int(found[1]) - (len(answer) - end - 4) if found else 0
    while missing > 0:
        missing -= len(connection.recv(1 << 16) or lost())
    return int(answer[9:12])


@contextmanager
def sender(port: int, form: str, *, is_bad: bool = False) -> Iterator[Callable[[], int]]:
    """Yield a function that sends a request over one connection, reads its answer, and returns the status of HTTP."""
    request = request_of(form, is_bad=is_bad)
    if form == "gRPC":
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            yield lambda: 200 if infer(request, timeout=60) else 0
    else:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            yield lambda: exchange(connection, request)


def lost() -> bytes:
    raise ConnectionError("the server closed the connection")


def load(port: int, form: str, clients: int, seconds: float, *, bad: bool = False) -> Load:
    """Return what clients measure that send one request after the other for some seconds."""
    times: list[list[float]] = [[] for _ in range(clients)]
    statuses: Counter[int] = Counter()
    start = threading.Barrier(clients)

    def send(number: int) -> None:
        own: Counter[int] = Counter()
        with sender(port, form, is_bad=bad and number % 2 == 1) as send_one:
            start.wait()
            ends_at = time.monotonic() + seconds
            while (began := time.monotonic()) < ends_at:
                own[send_one()] += 1
                times[number].append(time.monotonic() - began)
        statuses.update(own)

    used_s = time.process_time()
    threads = [threading.Thread(target=send, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(sorted(took for own in times for took in own), statuses, time.process_time() - used_s)


@contextmanager
def running(*words: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server and yield its process, which ends with the `with` block."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **settings}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def port_of(process: subprocess.Popen[str], before: str = "http://") -> int:
    """Return the port in the next line that has an address after these characters."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(rf"{before}127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise RuntimeError(f"{process.args} ended before it served")


def wait_until_answers(port: int, form: str) -> None:
    """Return when a request is answered well."""
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        try:
            with sender(port, form) as send_one:
                if send_one() == 200:
                    return
        except (OSError, grpc.RpcError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server at port {port} does not answer after {START_S:g} s")


def mlserver_folder(folder: Path, model: Path, port: int) -> Path:
    """Write the settings of MLServer for the model, and return their folder."""
    folder.mkdir()
    (folder / "settings.json").write_text(
        json.dumps({"host": "127.0.0.1", "http_port": port, "grpc_port": port + 1, "metrics_port": port + 2,
                    "parallel_workers": 0, "debug": False})
    )  # fmt: skip
    runtime = {"name": "model", "implementation": "_serving_mlserver.Classifier", "parameters": {"uri": str(model)}}
    (folder / "model-settings.json").write_text(json.dumps(runtime))
    return folder


def free_ports() -> int:
    """Return a port that is free, as most likely are the two after it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def memory_mib(process: subprocess.Popen[str]) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    given = options(__doc__, rounds=3, clients=16, milliseconds=3000, width=2048, mlserver=None, alone=False)
    seconds = given.milliseconds / 1e3
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export_classifier(folder / "model", given.width)
        python = (sys.executable, "-m")
        where = ("--address", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
        serve = (*python, "dflow", "serve", str(folder / "model"), *where, "--max-queue", "1000")
        batched = stack.enter_context(running(*serve, "--max-batch", "16"))
        ports = {
            ("dflow, batches", "binary"): port_of(batched),
            ("dflow, batches", "gRPC"): port_of(batched, "gRPC at "),
        }
        if not given.alone:
            by_hand = stack.enter_context(running(*python, "benchmarks._serving_bare", str(folder / "model")))
            plain = stack.enter_context(running(*serve))
            ports |= {("by hand", "raw"): port_of(by_hand), ("dflow", "binary"): port_of(plain)}
            ports["dflow", "gRPC"] = port_of(plain, "gRPC at ")
            ports["dflow, batches", "JSON"] = ports["dflow, batches", "binary"]
        if given.mlserver:
            port = ports["MLServer", "JSON"] = free_ports()
            ports["MLServer", "gRPC"] = port + 1
            words = given.mlserver, "start", str(mlserver_folder(folder / "ml", folder / "model", port))
            server = stack.enter_context(running(*words, PYTHONPATH=str(Path(__file__).parent)))
            threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True).start()  # its log
        for (_, form), port in ports.items():
            wait_until_answers(port, form)
        measured = in_turn(
            {f"{name}|{form}": lambda port=port, form=form: load(port, form, given.clients, seconds)
             for (name, form), port in ports.items()}, given.rounds,
        )  # fmt: skip
        rows = [row(way, times, seconds) for way, times in measured.items()]
        before = memory_mib(batched)
        port = ports["dflow, batches", "binary"]
        statuses = load(port, "binary", given.clients, 3 * seconds, bad=True).statuses
        good, bad = statuses.pop(200), statuses.pop(400)
        under_errors = {
            "clients": given.clients, "good answers": good, "refused": bad, "other": statuses.total(),
            "MiB before": before, "MiB after": memory_mib(batched),
        }  # fmt: skip
    publish("serving_errors", [under_errors], as_json=given.json)
    publish("serving", rows, as_json=given.json)


def row(way: str, rounds: list[Load], seconds: float) -> dict[str, Any]:
    """Return the figures of a server: medians over the rounds."""
    name, _, form = way.partition("|")
    refused = sum(one.statuses.total() - one.statuses[200] for one in rounds)

    def late(share: float) -> float:
        return 1e3 * statistics.median(
            one.times_s[min(int(share * len(one.times_s)), len(one.times_s) - 1)] for one in rounds
        )

    rate = statistics.median(len(one.times_s) / seconds for one in rounds)
    return {
        "server": name,
        "form": form,
        "requests/s": rate,
        "p50, ms": late(0.5),
        "p99, ms": late(0.99),
        "client, us": statistics.median(1e6 * one.client_s / len(one.times_s) for one in rounds),
        "refused": refused,
    }


if __name__ == "__main__":
    main()
