"""A plain HTTP client for tests of the dashboard."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Answer(NamedTuple):
    """A response; `data` is its JSON, or the bytes of one that is not."""

    status: int
    data: Any
    headers: dict[str, str]


class Client:
    """Requests to a dashboard, as a browser sends them."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        assert parts.port is not None
        self.port, self.origin = parts.port, f"{parts.scheme}://{parts.netloc}"
        self._is_secure = parts.scheme == "https"

    def connect(self) -> HTTPConnection:
        """Return a connection over loopback; the server's certificate is taken as it is."""
        if self._is_secure:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return HTTPSConnection("127.0.0.1", self.port, timeout=30, context=context)
        return HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        with closing(self.connect()) as connection:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, None if body is None else json.dumps(body), named)
            response = connection.getresponse()
            content = response.read()
            is_json = response.getheader("content-type", "").startswith("application/json")
            return Answer(response.status, json.loads(content) if is_json else content, dict(response.getheaders()))

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask(path, "POST", body, **{"Origin": self.origin, "Content_Type": "application/json", **headers})

    def error(self, path: str, **headers: str) -> tuple[int, str, str]:
        answer = self.ask(path, **headers)
        found = answer.data["error"]
        assert found["status"] == answer.status
        return answer.status, found["text"], found["remedy"]

    @contextmanager
    def stream(self) -> Iterator[HTTPResponse]:
        with closing(self.connect()) as connection:
            connection.request("GET", "/api/stream")
            response = connection.getresponse()
            yield response


def events_of(response: HTTPResponse) -> Iterator[tuple[str, Any]]:
    """Yield the server-sent events of a stream: names and data."""
    name = ""
    while line := response.readline():
        if line.startswith(b"event: "):
            name = line.removeprefix(b"event: ").strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line.removeprefix(b"data: "))
