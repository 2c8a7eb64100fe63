"""A server that speaks the dashboard's protocol from prepared answers, with one stream for each open page.

The answers are of a small cluster: two parameter tasks, and three workers, one of them in trouble.
"""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp

import dflow
from dflow.dashboard.access import _HEADERS
from dflow.graphs.graph_json import graph_json
from dflow.testing import memory_cluster

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "json": "application/json"}


class FakeServer:
    """Serves on a free port of this machine, or on `port`, until `close`."""

    def __init__(self, answers: Mapping[str, Any], port: int = 0) -> None:
        self.answers = dict(answers)
        self.posted: list[Any] = []
        #: The error that streams are refused with, if any.
        self.refusal: Any = None
        self._streams: list[queue.Queue[bytes | None]] = []
        handler = type("_Handler", (_FakeHandler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://127.0.0.1:{self.port}/"

    def push(self, event: str, data: Any) -> None:
        """Send an event to all streams; a state is also what new pages get."""
        if event == "state":
            self.answers["api/state"] = data
        for stream in self._streams:
            stream.put(encoded(event, data))

    def opened(self) -> queue.Queue[bytes | None]:
        """Add a stream that begins with the state."""
        stream: queue.Queue[bytes | None] = queue.Queue()
        stream.put(encoded("state", self.answers["api/state"]))
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """End all streams and the server."""
        for stream in self._streams:
            stream.put(None)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def encoded(event: str, data: Any) -> bytes:
    """An event of a stream as bytes."""
    return f"event: {event}\ndata: {json.dumps(data)}\n\n".encode()


class _FakeHandler(BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        path = urlsplit(self.path).path.lstrip("/")
        if path == "api/stream":
            self._stream()
        elif path.startswith("api/"):
            self._answer(path)
        else:
            name = path.removeprefix("static/") or "index.html"
            self._send(200, _TYPES[name.split(".")[-1]], files("dflow").joinpath("dashboard/static", name).read_bytes())

    def do_POST(self) -> None:
        self.fake.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer("POST " + self.path.lstrip("/"))

    def _answer(self, path: str) -> None:
        if path in self.fake.answers:
            self._send(200, _TYPES["json"], json.dumps(self.fake.answers[path]).encode())
        else:
            error = {"error": {"status": 404, "text": f"no answer for {path}", "remedy": "prepare one"}}
            self._send(404, _TYPES["json"], json.dumps(error).encode())

    def _stream(self) -> None:
        if self.fake.refusal is not None:
            self._send(503, _TYPES["json"], json.dumps({"error": self.fake.refusal}).encode())
            return
        stream = self.fake.opened()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        while (data := stream.get(timeout=60)) is not None:
            try:
                self.wfile.write(data)
                self.wfile.flush()
            except OSError:
                return

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


WORKERS = ("worker:0", "worker:1", "worker:2")


def task(name: str, **more: Any) -> dict[str, Any]:
    """A live task; `more` replaces or adds fields."""
    job, index = name.split(":")
    of_worker = job == "worker"
    steps = {"steps": 113, "steps_per_s": 17.1, "step_s": 0.0581} if of_worker else {"steps": 0, "steps_per_s": 0.0}
    used = {"processor": 0.63, "python_us": 310.0, "xla_us": 820.0, "wakeups": 3.1, "messages_per_s": 30.0}
    found = {"task": name, "job": job, "index": int(index), "state": "live", "level": "ok", "text": "live"}
    found |= {"address": f"127.0.0.1:3301{index}", "joined_at_s": 1.2, "left_at_s": None, "restarts": 0}
    found |= {"step_s": None, "parts": 340, "parts_per_s": 51.2, "running": 1, "waiting": 2, "held": 0, **steps}
    found |= {"queues": [] if of_worker else [{"name": "examples", "size": 3, "capacity": 10}], "queues_left_out": 0}
    found |= {"heard_s": 0.4, "doing": f"step 12 of {name}" if of_worker else "", "bytes_per_s": 120000.0, **used}
    found |= {"missed": 1.2 if of_worker else None, "metrics": {"loss": 0.31} if of_worker else {}}
    return found | {"dropped": 0, "claimed": 1} | more


def edge(name: str, source: str, destination: str, size_bytes: int, bytes_per_s: float) -> dict[str, Any]:
    """The traffic of an edge."""
    ends = {"edge": name, "source": source, "destination": destination}
    rates = {"messages_per_s": 17.0, "bytes_per_s": bytes_per_s}
    return ends | rates | {"messages": 120, "values": 360, "size_bytes": size_bytes}


def state(**more: Any) -> dict[str, Any]:
    """The answer to api/state."""
    tasks = [task("ps:0"), task("ps:1", processor=0.35), *map(task, WORKERS)]
    tasks[4] |= {"state": "straggler", "level": "warn", "text": "straggler, 2.1 x the median", "restarts": 1}
    tasks[4] |= {"step_s": 0.122, "steps_per_s": 8.1, "processor": 0.98}
    return {
        "phase": "running",
        "phase_text": "",
        "coordinator": "127.0.0.1:7711",
        "at_s": 35.2,
        "wall_s": 1790000000.0,
        "steps": {"done": 340, "total": 1500, "per_s": 42.3},
        "tasks": tasks,
        "tasks_left_out": 0,
        "jobs": {},
        "edges": [
            edge("conv1/kernel+2", "ps:1", "worker:*", 44_900_000, 6_700_000.0),
            edge("grad/conv1/bias+4", "worker:*", "ps:0", 7_200_000, 1_080_000.0),
        ],
        "edges_left_out": 0,
        "sent_bytes": 52_100_000,
        "variables": [
            {"name": "conv1/kernel", "type": "f32[3,3,1,16]", "size_bytes": 576, "task": "ps:1", "kind": "variable"},
            {"name": "examples", "type": "f32[64]", "size_bytes": 256, "task": "ps:0", "kind": "queue"},
        ],
        "variables_left_out": 0,
        "variables_bytes": 832,
        "snapshot": {"number": 4, "written_bytes": 576, "full_bytes": 832},
        "results": {"test accuracy": 0.9722},
        "not_finite": [],
        "newest_event": 4,
        "pages": 1,
    } | more


def series(task_name: str, name: str, unit: str, value: Any, count: int = 60) -> dict[str, Any]:
    """A series with `count` points, one each half second; `value` gives the value at each."""
    values = [value(index) for index in range(count)]
    return {
        "id": f"{task_name}/{name}",
        "task": task_name,
        "name": name,
        "unit": unit,
        "at_s": [index / 2 for index in range(count)],
        "step": [5 * index for index in range(count)],
        "value": values,
        "low": [0.96 * one for one in values],
        "high": [1.04 * one for one in values],
    }


def history() -> dict[str, Any]:
    """The answer to api/history."""
    found = [
        series("", "steps/s", "1/s", lambda at: 42 + 4 * math.sin(at / 3)),
        series("", "bytes/s", "B/s", lambda at: 7.8e6 + 1e5 * at),
    ]
    for number, name in enumerate(WORKERS):
        found += [
            series(name, "loss", "", lambda at, n=number: 2.3 * math.exp(-at / (18 + 3 * n)) + 0.08),
            series(name, "steps/s", "1/s", lambda at, n=number: 17 - 4 * n + math.sin(at / 2)),
            series(name, "processor", "cores", lambda at, n=number: 0.6 + 0.1 * n + 0.05 * math.cos(at)),
        ]
    return {"series": found, "left_out": 0}


def event(number: int, at_s: float, kind: str, text: str, task_name: str = "") -> dict[str, Any]:
    """An event of the coordinator."""
    return {"number": number, "at_s": at_s, "kind": kind, "task": task_name, "text": text}


def events() -> list[dict[str, Any]]:
    """The cluster's events."""
    return [
        event(1, 1.2, "joined", "ps:0 joined", "ps:0"),
        event(2, 1.4, "joined", "worker:2 joined", "worker:2"),
        event(3, 12.0, "left", "worker:2 has left: no heartbeat for 10 s", "worker:2"),
        event(4, 15.1, "restarted", "worker:2 was started again", "worker:2"),
        event(5, 20.0, "snapshot", "snapshot 4: 576 B written of 832 B"),
    ]


def functions() -> dict[str, Any]:
    """The answer to api/functions."""
    changes = ["x: f32[8,64] -> f32[5,64]"]
    one = {"id": 3, "name": "train_step", "line": "digits.py:12", "traces": 2, "last_changes": changes}
    one |= {"has_graph": True, "total_ms": 812.0}
    return {"tasks": [{"task": "worker:0", "functions": [one]}], "missing": {"worker:1": "did not answer within 2 s"}}


def traces() -> dict[str, Any]:
    """The answer to api/traces."""
    shared = {"call": "digits.py:40", "arguments": {"x": "f32[8,64]", "y": "i32[8]"}, "trace_ms": 20.1, "captured": []}
    shared["has_graph"] = True
    changes = ["x: f32[8,64] -> f32[5,64]", "y: i32[8] -> i32[5]"]
    records = [
        shared | {"number": 1, "changes": ["first trace"], "total_ms": 610.0},
        shared | {"number": 2, "changes": changes, "total_ms": 202.0},
    ]
    return {"task": "worker:0", "id": 3, "name": "train_step", "records": records, "left_out": 0}


def graph() -> dict[str, Any]:
    """The answer to api/graph: a step with scopes, a nested function, and state on two tasks."""

    @jax.jit
    def activated(x: Any) -> Any:
        return jnp.tanh(x) * 2

    def train_step(x: Any) -> Any:
        def loss() -> Any:
            with jax.named_scope("dense"):
                hidden = activated(x @ w + b)
            with jax.named_scope("loss"):
                return (hidden**2).mean()

        value, gradients = dflow.value_and_grad(loss, [w, b])()
        with jax.named_scope("update"):
            w.assign_sub(gradients[0] * 0.1)
            b.assign_sub(gradients[1] * 0.1)
        return value

    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            w = dflow.Variable(lambda: jnp.zeros((64, 10)), name="dense/kernel")
            b = dflow.Variable(lambda: jnp.zeros(10), name="dense/bias")
        view = dflow.graph(train_step, jax.ShapeDtypeStruct((8, 64), jnp.float32))
        cluster.close()
    return graph_json(view.graph, "train_step")


def timeline(line: str = "digits.py:14") -> dict[str, Any]:
    """The answer to api/timeline, with a measured item at `line`."""
    times = {"took": 4423.0, "python": 475.0, "xla": 2230.0, "sending": 141.0, "wire": 330.0, "waiting": 1247.0}
    took = {"task": "worker:0", "starters": "worker", "steps": 5, **{f"{name}_us": us for name, us in times.items()}}
    took |= {"messages": 2.0, "values": 8.0, "size_bytes": 153200.0}
    message = {"edge": "dense/kernel", "source": "ps:1", "destination": "worker:0", "messages": 1.0, "values": 3.0}
    message |= {"size_bytes": 131900.0, "sending_us": 52.0, "arrival_us": 230.0}
    item = {"task": "worker:0", "line": line, "name": "%10 (xla.call)", "kind": "Call", "per_step": 1.0}
    items = [item | {"mean_us": 2100.0}, item | {"kind": "Recv", "name": "dense/kernel", "mean_us": 1040.0}]
    state = {"state": "done", "text": "5 steps of 2 tasks, clocks aligned to 30 us", "steps": 5, "number": 1}
    return state | {"size_bytes": 81234, "took": [took], "messages": [message], "items": items, "starting": "worker"}


def trace() -> dict[str, Any]:
    """The answer to api/timeline/trace.json: three steps of a worker and its parameter task."""
    found: list[dict[str, Any]] = []
    tracks = {
        "ps:1": ("parts of steps", "Python", "messages"),
        "worker:0": ("steps", "Python", "XLA", "messages", "waits"),
    }
    for pid, (name, own) in enumerate(tracks.items(), 1):
        found.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}})
        for tid, track in enumerate(own, 1):
            found.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": track}})
    for step in range(3):
        at, flow = 4600.0 * step, {"id": step + 1, "name": "dense/kernel", "cat": "messages"}
        found += [
            _slice(2, 1, f"step {step} of worker:0", "steps", at, 4400, step),
            _slice(1, 1, f"step {step} of worker:0", "parts of steps", at + 60, 4200, step),
            _slice(1, 2, "dense/kernel (var.read)", "Python", at + 80, 120, step),
            _slice(1, 3, "dense/kernel to worker:0", "messages", at + 210, 900, step),
            _slice(2, 5, "wait for ps:1: dense/kernel", "waits", at + 40, 1080, step),
            _slice(2, 4, "dense/kernel from ps:1", "messages", at + 1110, 1, step),
            _slice(2, 2, "dispatch %10 (xla.call)", "Python", at + 1140, 160, step),
            _slice(2, 3, "%10 (xla.call)", "XLA", at + 1160, 2230, step),
            flow | {"ph": "s", "pid": 1, "tid": 3, "ts": at + 210},
            flow | {"ph": "f", "bp": "e", "pid": 2, "tid": 4, "ts": at + 1110},
        ]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {}}


def _slice(pid: int, tid: int, name: str, cat: str, ts: float, dur: float, step: int) -> dict[str, Any]:
    args = {"step": f"step {step} of worker:0", "line": "digits.py:14"}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}
