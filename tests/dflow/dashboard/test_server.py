"""The dashboard's server over a cluster in this process: its answers, and access by address, Host, token and Origin."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax.numpy as jnp
import pytest

import dflow
from dflow.cli.certs import init_authority, issue_to, make_secret
from dflow.dashboard import serving
from dflow.dashboard.access import POLICY
from dflow.dashboard.function_requests import MOST_GRAPHS, FunctionRequests
from dflow.dashboard.serving import DashboardServer
from dflow.distributed.launching import dashboard_address
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import ConfigError, DeadlineExceeded, SecurityError
from tests.dflow.dashboard.http_client import Client, events_of
from tests.distributed.waiting import until

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:train_step is traced and compiled again during a run:dflow.RetraceWarning"),
]


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


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        memory_cluster(ps=0, workers=0) as memory,
        closing(DashboardServer(memory.network, memory.coordinator.address, host_names=["proxy.example"])) as server,
    ):
        yield Client(server.address)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> SecurityPolicy:
    file: Path = tmp_path_factory.mktemp("secret") / "cluster.secret"
    make_secret(file)
    return SharedSecret(file)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *(
            (host, True)
            for host in ("127.0.0.1", "localhost:80", "[::1]:9", "10.1.2.3:5", "PROXY.example", "localhost.")
        ),
        *((host, False) for host in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example")),
        *((host, False) for host in ("[evil]", "1", "")),
    ],
)
def test_a_host_that_an_attacker_points_here_is_refused(client: Client, host: str, is_own: bool) -> None:
    answer = client.ask("/api/state", Host=host)
    assert answer.status == (200 if is_own else 421)
    if not is_own:
        error = answer.data["error"]
        assert error["text"] == f"Host: expected an IP address or one of localhost, proxy.example, got {host!r}"
        assert "--host-name" in error["remedy"]


def test_answers_may_be_used_by_pages_of_this_server_alone(client: Client) -> None:
    for path in ("/api/state", "/api/nothing"):
        headers = {name.lower(): value for name, value in client.ask(path).headers.items()}
        assert headers["content-security-policy"] == POLICY
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cross-origin-opener-policy"] == "same-origin-allow-popups", "the page talks to Perfetto's tab"
        assert headers["x-content-type-options"] == "nosniff"
        assert not {"access-control-allow-origin", "server"} & headers.keys()
    assert "http" not in POLICY
    assert "unsafe-eval" not in POLICY


@pytest.mark.parametrize(
    ("headers", "body", "status", "text"),
    [
        ({"Origin": "http://evil.example"}, {"steps": 1}, 403, "got http://evil.example"),
        ({"Origin": ""}, {"steps": 1}, 403, "got none"),
        ({"Content_Type": "text/plain"}, {"steps": 1}, 415, "Content-Type: expected application/json, got text/plain"),
        ({}, {"steps": 0}, 400, "steps: expected 1 to 100, got 0"),
        ({}, {"timeout_s": 1e9}, 400, "timeout_s: expected 1 to 600, got 1000000000.0"),
        ({}, {"steps": "x"}, 400, "body: expected JSON with steps and timeout_s: Expected `int`, got `str`"),
        ({}, {"speed": 1}, 400, "Object contains unknown field `speed`"),
        ({}, {"steps": 1, "note": "x" * 5000}, 413, "body: expected at most 4096 bytes, got more"),
    ],
)
def test_a_trace_is_made_by_right_orders_of_pages_of_this_server_alone(
    client: Client, headers: dict[str, str], body: dict[str, object], status: int, text: str
) -> None:
    answer = client.post("/api/timeline", body, **headers)
    assert answer.status == status
    assert text in answer.data["error"]["text"]
    assert client.ask("/api/timeline").data["state"] == "none"


def test_wrong_requests_get_a_clear_error(client: Client) -> None:
    assert client.error("/api/nothing")[:2] == (404, "path: expected a known one, got '/api/nothing'")
    assert client.error("/static/../server.py")[0] == 404
    assert client.error("/static/%2e%2e/server.py")[0] == 404
    assert client.error("/api/events?since=-1") == (400, "since: expected a whole number, got '-1'", "give ?since=1")
    assert client.error("/api/traces?id=1")[1] == "task: expected a value, got none"
    assert client.error("/api/traces?task=ps:7&id=1")[:2] == (404, "task: expected a live one (none now), got 'ps:7'")
    assert client.error("/api/timeline/trace.json")[0] == 404
    answer = client.ask("/api/state", "PUT", {}, Origin=client.origin, Content_Type="application/json")
    assert (answer.status, answer.data["error"]["remedy"]) == (405, "use GET")


def test_requests_beyond_the_limit_are_told_to_come_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_REQUESTS", 0)
    assert client.error("/api/state") == (
        503,
        "requests: expected at most 0 at a time, got one more",
        "ask again later",
    )


def test_off_loopback_it_needs_certificates_or_a_secret() -> None:
    with pytest.raises(SecurityError, match="is not a loopback address, and no certificates or secret are configured"):
        DashboardServer(MemoryNetwork(), "memory:1", "0.0.0.0:0")


@pytest.mark.parametrize("place", ["", "x", "127.0.0.1:", "70000", "127.0.0.1:-1"])
def test_a_malformed_address_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"address of the dashboard: expected a port or HOST:PORT, got "):
        DashboardServer(MemoryNetwork(), "memory:1", place)


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"the dashboard cannot listen at 127.0.0.1:{port}: Address already in use"):
            DashboardServer(MemoryNetwork(), "memory:1", str(port))


def test_without_its_packages_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_address, "PACKAGES", ("starlette", "no_such_package"))
    with pytest.raises(ConfigError, match=r"got none of no_such_package(.|\n)*pip install 'dflow\[dashboard\]'"):
        DashboardServer(MemoryNetwork(), "memory:1")


@pytest.mark.parametrize("place", ["0", "0.0.0.0:0"])
def test_with_a_secret_a_browser_needs_the_token_of_the_address(secret: SecurityPolicy, place: str) -> None:
    with ExitStack() as stack:
        memory = stack.enter_context(memory_cluster(ps=0, workers=0))
        server = DashboardServer(memory.network, memory.coordinator.address, place, security=secret)
        stack.enter_context(closing(server))
        is_secure = place != "0"
        parts = urlsplit(server.address)
        assert parts.scheme == ("https" if is_secure else "http")
        assert parts.hostname == (socket.gethostname().lower() if is_secure else "127.0.0.1")
        client, token = Client(server.address), parts.query.removeprefix("token=")
        assert len(token) >= 43
        assert client.error("/api/state")[1] == "token: expected that of this dashboard, got none"
        assert client.error(f"/?token={token[:-1]}")[1] == "token: expected that of this dashboard, got another one"
        assert client.error("/api/stream")[0] == 401
        entered = client.ask(f"/api/state?token={token}")
        assert (entered.status, entered.headers["location"]) == (303, "/api/state")
        cookie, *attributes = entered.headers["set-cookie"].split("; ")
        assert cookie == f"dflow-dashboard-{parts.port}={token}"
        assert {"HttpOnly", "SameSite=strict"} <= {*attributes}
        assert ("Secure" in attributes) == is_secure
        assert client.ask("/api/state", Cookie=cookie).status == 200
        assert client.ask("/api/state", Authorization=f"Bearer {token}").status == 200
        for wrong in (f"{cookie}x", "dflow-dashboard-1=" + token, "=;,"):
            assert client.error("/api/state", Cookie=wrong)[0] == 401
        assert client.error("/api/state", Host="evil.example", Cookie=cookie)[0] == 421
        assert client.post(f"/api/timeline?token={token}", {"steps": 1}).status == 401, "no change by a link"
        assert client.ask("/api/state", Host=socket.gethostname(), Cookie=cookie).status == (200 if is_secure else 421)


def test_with_certificates_a_browser_that_trusts_the_authority_gets_encrypted_pages(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    init_authority(folder, days=2)
    issue_to(folder, ["status"], ["127.0.0.1"], days=1)
    (issued,) = (path for path in folder.iterdir() if path.is_dir())
    trust = ssl.create_default_context(cafile=folder / "ca.pem")
    with ExitStack() as stack:
        memory = stack.enter_context(memory_cluster(ps=0, workers=0))
        security = MutualTls.in_folder(issued)
        server = DashboardServer(memory.network, memory.coordinator.address, "0.0.0.0:0", security=security)
        stack.enter_context(closing(server))
        parts = urlsplit(server.address)
        connection = stack.enter_context(closing(HTTPSConnection("127.0.0.1", parts.port, timeout=30, context=trust)))
        connection.request("GET", f"/?{parts.query}")
        assert connection.getresponse().status == 303
