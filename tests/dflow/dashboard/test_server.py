"""The dashboard's server over a cluster in this process, asked by a plain HTTP client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import dflow
from dflow.dashboard.function_requests import MOST_GRAPHS, FunctionRequests
from dflow.dashboard.serving import DashboardServer
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeadlineExceeded
from tests.dflow.dashboard.http_client import Client, events_of
from tests.distributed.waiting import until

pytestmark = pytest.mark.once


class Served(NamedTuple):
    """A cluster whose worker runs steps until the end, and its dashboard."""

    memory: MemoryCluster
    worker: dflow.distributed.Cluster
    client: Client


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    ending = threading.Event()
    with memory_cluster(ps=1) as memory:
        worker = memory.worker()
        with worker.parameter_servers():
            w = dflow.Variable(lambda: jnp.ones(4), name="w")

        @dflow.jit
        def train_step(x: Any) -> Any:
            w.assign_sub(jnp.broadcast_to(0.1 * x, 4))
            return {"loss": w.read().sum()}

        def batches() -> Iterator[Any]:
            yield (jnp.ones(1),)  # traced twice: for one element, and for four
            while not ending.wait(0.002):
                yield (jnp.ones(4),)

        def run() -> None:
            for _ in dflow.distributed.Async(worker).run(train_step, batches(), steps=10**6):
                pass

        thread = threading.Thread(target=run)
        thread.start()
        with closing(DashboardServer(memory.network, memory.coordinator.address, every_s=0.05)) as server:
            client = Client(server.address)
            until(lambda: client.ask("/api/state").data.get("steps", {}).get("per_s", 0) > 0)
            yield Served(memory, worker, client)
        ending.set()
        thread.join()
        worker.close()


def test_the_state_and_the_curves_are_served(served: Served) -> None:
    state = served.client.ask("/api/state").data
    assert (state["phase"], state["phase_text"]) == ("running", "")
    assert [task["task"] for task in state["tasks"]] == ["ps:0", "worker:0"]
    assert state["variables"] == [{"name": "w", "type": "f32[4]", "size_bytes": 16, "task": "ps:0", "kind": "variable"}]
    assert state["steps"]["total"] == 10**6

    def losses() -> list[Any]:
        series: list[Any] = served.client.ask("/api/history?names=loss").data["series"]
        return series

    until(lambda: bool(losses()) and len(losses()[0]["at_s"]) > 2)
    (loss,) = losses()
    assert (loss["id"], loss["task"], loss["name"]) == ("worker:0/loss", "worker:0", "loss")
    assert loss["step"] == sorted(loss["step"])
    names = {one["name"] for one in served.client.ask("/api/history").data["series"]}
    assert {"loss", "steps/s", "processor"} <= names


def test_functions_their_traces_and_a_graph_are_served(served: Served) -> None:
    listed = served.client.ask("/api/functions").data
    assert listed["missing"] == {}
    (task,) = listed["tasks"]
    assert task["task"] == "worker:0"
    function = next(one for one in task["functions"] if one["name"] == "train_step")
    assert function["last_changes"] == ["x: f32[1] -> f32[4]"]
    assert function["line"].startswith("test_server.py:")
    where = f"task=worker:0&id={function['id']}"
    traces = served.client.ask(f"/api/traces?{where}").data
    assert [record["changes"] for record in traces["records"]] == [["first trace"], ["x: f32[1] -> f32[4]"]]
    assert traces["records"][0]["arguments"] == {"x": "f32[1]"}
    newest, first = (served.client.ask(f"/api/graph?{where}{more}").data for more in ("", "&trace=1"))
    assert (newest["trace"], newest["name"], first["trace"]) == (2, "train_step", 1)
    assert newest["graph"]["title"] == "train_step"
    assert "var.assign_sub" in {node.get("op") for node in newest["graph"]["nodes"]}
    assert newest["graph"] != first["graph"]
    assert served.client.error(f"/api/graph?{where}&trace=9")[:2] == (
        404,
        "/job:worker/task:0: trace 9 of train_step: expected one of 1 to 2 that JAX keeps, got one without a graph",
    )


def test_a_timeline_is_made_when_a_page_asks_and_its_stream_tells(served: Served) -> None:
    client = served.client
    with client.stream() as response:
        events = events_of(response)
        assert next(events)[0] == "state"
        answer = client.post("/api/timeline", {"steps": 2})
        assert answer.status == 202
        assert answer.data["state"] == "running"
        told = next(data for name, data in events if name == "timeline" and data["state"] == "done")
    assert told["text"].startswith("2 steps of 2 tasks, clocks aligned to ")
    assert {row["task"] for row in told["took"]} == {"ps:0", "worker:0"}
    assert all(row["python_us"] >= 0 for row in told["took"])
    assert any(row["kind"] == "Call" and f"{__file__}:" in row["line"] for row in told["items"])
    assert told["messages"][0]["size_bytes"] > 0
    trace = client.ask("/api/timeline/trace.json")
    assert {event["cat"] for event in trace.data["traceEvents"] if event["ph"] == "X"} >= {"XLA", "steps"}
    assert client.ask("/api/timeline").data == told


def test_a_stream_has_states_and_points_and_news(served: Served) -> None:
    with served.client.stream() as response:
        assert response.getheader("content-type") == "text/event-stream"
        events = events_of(response)
        assert next(events)[1]["phase"] == "running"
        assert next(data for name, data in events if name == "state")["pages"] == 1
        points = (data["values"] for name, data in events if name == "points")
        assert next(values for values in points if "worker:0/loss" in values)["worker:0/loss"] is not None
    kinds = [event["kind"] for event in served.client.ask("/api/events").data["events"]]
    assert kinds[:2] == ["joined", "joined"]


def test_many_pages_make_one_look_a_second_and_one_more_is_refused() -> None:
    with memory_cluster(ps=0, workers=0) as memory:
        asked: list[str] = []
        handle = memory.coordinator._state.handle

        def counted(event: Any) -> Any:
            asked.append(type(getattr(event, "message", None)).__name__)
            return handle(event)

        memory.coordinator._state.handle = counted  # type: ignore[method-assign]
        with closing(DashboardServer(memory.network, memory.coordinator.address, most_pages=2, every_s=0.05)) as server:
            client = Client(server.address)
            with client.stream() as one, client.stream() as two:
                states = [[next(events_of(each))[1]] for each in (one, two)]
                assert states[0][0]["pages"] >= 1
                status, text, _ = client.error("/api/stream")
                assert (status, text) == (503, "pages: expected at most 2 at once, got one more")
                asked.clear()
                for each in (one, two):
                    seen = [name for name, _ in (next(events_of(each)) for _ in range(6))]
                    assert "state" in seen
                    assert client.ask("/api/state").data["phase"] == "running"
            until(lambda: client.ask("/api/state").data["pages"] == 0)
        assert asked.count("GetStatus") == pytest.approx(asked.count("GetEvents"), abs=1), "both once a look"


def test_a_server_that_closes_ends_the_streams_of_its_pages(caplog: pytest.LogCaptureFixture) -> None:
    with memory_cluster(ps=0, workers=0) as memory:
        server = DashboardServer(memory.network, memory.coordinator.address, every_s=0.05)
        with Client(server.address).stream() as response:
            assert next(events_of(response))[0] == "state"
            server.close()
            *_, (last, _) = events_of(response)
            assert last in ("state", "points", "news", "timeline")
    assert "ASGI" not in caplog.text


def test_tasks_that_hang_do_not_keep_pages_from_the_state(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, is_over = threading.Semaphore(0), threading.Event()

    class Hanging:
        def call(self, *_: Any, **__: Any) -> Any:
            entered.release()
            assert is_over.wait(30)
            raise DeadlineExceeded("the task hangs")

    monkeypatch.setattr(FunctionRequests, "_peer", lambda *_: Hanging())
    client = served.client
    with ThreadPoolExecutor(45) as pool:
        try:
            graphs = [pool.submit(client.ask, "/api/graph?task=ps:0&id=1") for _ in range(MOST_GRAPHS)]
            assert all(entered.acquire(timeout=30) for _ in graphs)
            text = f"graphs: expected at most {MOST_GRAPHS} at a time, got one more"
            assert client.error("/api/graph?task=ps:0&id=1")[:2] == (503, text)
            traces = [pool.submit(client.ask, "/api/traces?task=ps:0&id=1") for _ in range(41)]
            assert all(entered.acquire(timeout=30) for _ in range(36)), "all threads of the shared pool wait"
            for path in ("/api/state", "/api/history", "/api/events"):
                assert client.ask(path).status == 200
        finally:
            is_over.set()
        assert {found.result().status for found in [*graphs, *traces]} == {504}
