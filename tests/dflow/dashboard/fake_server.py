"""A server that speaks the dashboard's protocol from prepared answers, with one stream for each open page."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from dflow.dashboard.access import _HEADERS

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
