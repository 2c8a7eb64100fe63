"""Access to a dashboard: its address, Host, token, Origin and limits."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflow.cli.certs import init_authority, issue_to, make_secret
from dflow.dashboard import serving
from dflow.dashboard.access import POLICY
from dflow.dashboard.serving import DashboardServer
from dflow.distributed.launching import dashboard_address
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.testing import memory_cluster
from dflow.tracing.errors import ConfigError, SecurityError
from tests.dflow.dashboard.http_client import Client

pytestmark = pytest.mark.once


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
    assert client.error("/api/traces?task=ps:7&id=1")[:2] == (
        404,
        "task: expected a live one (none now), got 'ps:7'",
    )
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
