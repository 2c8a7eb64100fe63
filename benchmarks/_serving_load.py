"""Clients that load a server of the Open Inference Protocol, and the processes of servers; see `benchmarks.serving`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc

from dflow.serving.grpc_messages import MESSAGES, SERVICE

START_S = 120.0
LENGTH = re.compile(rb"\ncontent-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Load:
    """Times of requests, sorted; the number of answers by status of HTTP; and the processor time of the clients."""

    times_s: list[float]
    statuses: Counter[int]
    client_s: float


def request_of(form: str, model: str, tensor: dict[str, Any], content: bytes, values: Sequence[Any]) -> bytes:
    """Return the bytes of a request with one input: `raw`, in the protocol's `binary` form, in `JSON`, or by `gRPC`.

    tensor   the name, the shape and the datatype of the input
    content  its values in the binary form; `values` are those in JSON
    """
    if form == "gRPC":
        message = MESSAGES["ModelInferRequest"](model_name=model, inputs=[tensor], raw_input_contents=[content])
        return bytes(message.SerializeToString())
    body, extra = content, ""
    if form == "binary":
        input = tensor | {"parameters": {"binary_data_size": len(content)}}
        head = json.dumps({"inputs": [input], "parameters": {"binary_data_output": True}}).encode()
        body, extra = head + body, f"Inference-Header-Content-Length: {len(head)}\r\n"
    if form == "JSON":
        body = json.dumps({"inputs": [tensor | {"data": values}]}).encode()
    kind = "application/json" if form == "JSON" else "application/octet-stream"
    head_lines = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head_lines}Content-Length: {len(body)}\r\n\r\n".encode() + body


def exchange(connection: socket.socket, request: bytes) -> tuple[int, bytes]:
    """Send a request, read its answer, and return the status and the body."""
    connection.sendall(request)
    answer = b""
    while (end := answer.find(b"\r\n\r\n")) < 0:
        answer += connection.recv(1 << 16) or lost()
    found = LENGTH.search(answer, 0, end)
    whole = end + 4 + (int(found[1]) if found else 0)
    while len(answer) < whole:
        answer += connection.recv(1 << 16) or lost()
    return int(answer[9:12]), answer[end + 4 :]


@contextmanager
def sender(port: int, form: str) -> Iterator[Callable[[bytes], tuple[int, bytes]]]:
    """Yield a function that sends a request over one connection, and returns the status of HTTP and the body."""
    if form == "gRPC":
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            yield lambda request: (200, infer(request, timeout=60))
    else:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            yield lambda request: exchange(connection, request)


def lost() -> bytes:
    raise ConnectionError("the server closed the connection")


def load(port: int, form: str, requests: Sequence[Sequence[bytes]], seconds: float) -> Load:
    """Return what clients measure that send one request after the other for some seconds; each has its own requests."""
    times: list[list[float]] = [[] for _ in requests]
    statuses: Counter[int] = Counter()
    start = threading.Barrier(len(requests))

    def send(own_times: list[float], own_requests: Sequence[bytes]) -> None:
        own: Counter[int] = Counter()
        with sender(port, form) as send_one:
            start.wait()
            ends_at = time.monotonic() + seconds
            for request in cycle(own_requests):
                if (began := time.monotonic()) >= ends_at:
                    break
                own[send_one(request)[0]] += 1
                own_times.append(time.monotonic() - began)
        statuses.update(own)

    used_s = time.process_time()
    threads = [threading.Thread(target=send, args=both) for both in zip(times, requests, strict=True)]
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


def answer_of(port: int, form: str, request: bytes) -> bytes:
    """Return the body of the first answer to a request that is a good one, as soon as there is one."""
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at:
        try:
            with sender(port, form) as send_one:
                status, body = send_one(request)
            if status == 200:
                return body
        except (OSError, grpc.RpcError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server at port {port} does not answer after {START_S:g} s")


def free_ports() -> int:
    """Return a port that is free, as most likely are the two after it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def memory_mib(process: subprocess.Popen[str]) -> float:
    """Return the resident memory of a process."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


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
