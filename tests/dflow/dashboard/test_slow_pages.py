"""Pages that do not read, connections without a request, looks that take long, and files that are left."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflow.dashboard import cluster_watch, streams
from dflow.dashboard.cluster_watch import ClusterWatch
from dflow.dashboard.dashboard_record import PageUpdate
from dflow.dashboard.serving import DashboardServer
from dflow.dashboard.timeline import LastTimeline
from dflow.serving import http_connection
from dflow.testing import memory_cluster
from tests.dflow.dashboard.http_client import Client
from tests.distributed.waiting import until

pytestmark = pytest.mark.once


def connected(server: DashboardServer) -> int:
    return len(server._server.server_state.connections)


def test_a_page_that_falls_behind_and_does_not_read_the_end_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_S", 0.2)
    aborted: list[bool] = []

    async def serve() -> int:
        one = streams.Streams(lambda: [("state", {})])
        one.open()
        ends, is_slow = 0, asyncio.Event()

        async def send(message: Any) -> None:
            nonlocal ends
            if message["type"] == "http.response.body" and message["more_body"]:
                await is_slow.wait()
            elif message["type"] == "http.response.body":
                ends += 1
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"state": {http_connection.ABORT: lambda: aborted.append(True)}}
        task = asyncio.create_task(one(scope, receive, send))
        while not one.pages:
            await asyncio.sleep(0)
        for _ in range(streams.KEPT + 1):
            one.publish([("state", {})])
        await asyncio.sleep(0)
        is_slow.set()
        async with asyncio.timeout(20):
            await task
        assert one.pages == 0
        return ends

    assert asyncio.run(serve()) == 1
    assert aborted == [True]


def test_the_connection_of_a_page_that_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SEND_S", 0.2)
    with (
        memory_cluster(ps=0, workers=0) as memory,
        closing(DashboardServer(memory.network, memory.coordinator.address, every_s=0.05)) as server,
        closing(socket.socket()) as page,
    ):
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        page.connect(("127.0.0.1", Client(server.address).port))
        page.sendall(b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        until(lambda: server.streams.pages == 1)

        def is_closed() -> bool:
            server.streams.publish([("state", {"x": "y" * 1_000_000})])
            return connected(server) == 0

        until(is_closed)


def test_the_last_state_is_told_again_while_a_look_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, told = threading.Event(), threading.Semaphore(0)

    def slow(*_: Any) -> Any:
        is_over.wait(30)
        raise OSError("too slow")

    def update(updates: Sequence[PageUpdate]) -> None:
        assert [name for name, _ in updates] == ["state"]
        told.release()

    monkeypatch.setattr(cluster_watch, "look", slow)
    with memory_cluster(ps=0, workers=0) as memory:
        watch = ClusterWatch(memory.network, memory.coordinator.address, update, every_s=0.02)
        try:
            assert all(told.acquire(timeout=10) for _ in range(3))
        finally:
            is_over.set()
            watch.close()


def test_a_dashboard_has_no_folder_before_the_first_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with memory_cluster(ps=0, workers=0) as memory:
        states: list[str] = []
        timeline = LastTimeline(memory.network, memory.coordinator.address, lambda data: states.append(data["state"]))
        assert not list(tmp_path.iterdir()), "one that is killed leaves nothing"
        timeline.start(1, 0.1)
        until(lambda: states[-1] != "running")
        assert list(tmp_path.iterdir())
        timeline.close()
        assert not list(tmp_path.iterdir())
