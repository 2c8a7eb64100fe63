"""The server's answers: metadata, health, errors, limits, the stop, and connections that leave the machine."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import ssl
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dflow
from dflow.cli.certs import init_authority, issue_to
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SameMachine
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.serving import http_api
from dflow.serving.content_encoding import decompressed, takes_gzip
from dflow.serving.model_server import ModelServer
from dflow.serving.served_version import ServingSettings
from dflow.tracing.errors import ConfigError, SecurityError
from tests.dflow.serving.inference_client import binary_request, call, infer, json_request
from tests.dflow.serving.small_exports import HeldCalls, scale, served
from tests.distributed.waiting import until

pytestmark = pytest.mark.once

ROW = np.array([[1, 2]], np.float32)


def many(batch: Any, half: Any, *, flag: Any) -> Any:
    return {"sum": (batch["a"] + batch["b"], half * 2), "both": flag}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: `scale`, of one function, and `pair` with two, which take rows."""
    place = tmp_path_factory.mktemp("models")
    scale(place / "scale", 2)
    rows, numbers = dflow.spec("b, 2", jnp.float32), dflow.spec("b", jnp.int32)
    spec = dflow.export(many, {"a": numbers, "b": numbers}, dflow.spec("b", jnp.bfloat16), flag=dflow.spec("b", bool))
    dflow.export({"many": spec, "joined": (lambda x, y: x @ y, rows, dflow.spec("2, n", jnp.float32))}).save(
        place / "pair" / "7"
    )
    return place


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server of both, with batches of at most 4 rows and requests of at most 10,000 bytes."""
    with served(folder, ServingSettings(max_batch=4, max_bytes=10_000)) as server:
        yield server.url


def test_metadata_names_inputs_and_outputs_as_the_protocol_does(url: str) -> None:
    assert call(url, "/v2")[1] == {"name": "dflow", "version": dflow.__version__, "extensions": ["binary_tensor_data"]}
    status, body, _ = call(url, "/v2/models/pair.many/versions/7")
    assert (status, body) == (
        200,
        {
            "name": "pair.many",
            "versions": ["7"],
            "platform": "dflow",
            "inputs": [
                {"name": "batch['a']", "datatype": "INT32", "shape": [-1]},
                {"name": "batch['b']", "datatype": "INT32", "shape": [-1]},
                {"name": "half", "datatype": "BF16", "shape": [-1]},
                {"name": "flag", "datatype": "BOOL", "shape": [-1]},
            ],
            "outputs": [
                {"name": "both", "datatype": "BOOL", "shape": [-1]},
                {"name": "sum[0]", "datatype": "INT32", "shape": [-1]},
                {"name": "sum[1]", "datatype": "BF16", "shape": [-1]},
            ],
        },
    )
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/scale/ready", "/v2/models/scale/versions/1/ready"):
        assert call(url, path)[0] == 200


def test_the_id_and_the_wanted_outputs_are_those_of_the_request(url: str) -> None:
    request = json.loads(json_request(x=ROW)) | {"id": "a7", "outputs": [{"name": "result"}]}
    assert infer(url, "scale", json.dumps(request).encode())[1] == {
        "model_name": "scale",
        "model_version": "1",
        "id": "a7",
        "outputs": [{"name": "result", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]}],
    }


@pytest.mark.parametrize(
    ("model", "inputs", "status", "text"),
    [
        ("scale", {"x": ROW.astype(np.int32)}, 400, "input 'x': expected FP32[b,2], got INT32[1, 2]"),
        ("scale", {"x": ROW[0]}, 400, "input 'x': expected FP32[b,2], got FP32[2]"),
        ("scale", {"y": ROW}, 400, "scale: expected the inputs x, got y"),
        ("scale", {}, 400, "scale: expected the inputs x, got none"),
        ("scale", {"x": np.ones((5, 2), np.float32)}, 400, "scale: expected at most 4 rows, got 5"),
        ("pair", {}, 404, "model 'pair' has several functions; name one: pair.many, pair.joined"),
        ("pair.some", {}, 404, "model 'pair' has no function 'some'; it has pair.many, pair.joined"),
        ("other", {}, 404, "there is no model 'other'; there is pair.many, pair.joined, scale"),
        ("scale/versions/2", {}, 404, "model 'scale': expected version 1, which is served, got 2"),
        (
            "pair.many",
            {
                "batch['a']": np.ones(2, np.int32),
                "batch['b']": np.ones(3, np.int32),
                "half": np.ones(2, ml_dtypes.bfloat16),
                "flag": np.ones(2, bool),
            },
            400,
            "input \"batch['b']\": expected 2 for b, as \"batch['a']\" has, got 3",
        ),
    ],
)
def test_a_bad_request_is_answered_by_an_error_that_names_it(
    url: str, model: str, inputs: dict[str, Any], status: int, text: str
) -> None:
    found, body, _ = infer(url, model, json_request(**inputs))
    assert (found, body["error"][: len(text)]) == (status, text)


def test_other_requests_are_refused(url: str) -> None:
    for path, body, allowed, method in (
        ("/v2/models/scale/infer", None, "POST", "GET"),
        ("/v2/models/scale/versions/1/infer", None, "POST", "GET"),
        ("/v2/repository/index", None, "POST", "GET"),
        ("/v2/models/scale/ready", b"", "GET or HEAD", "POST"),
        ("/metrics", b"", "GET or HEAD", "POST"),
    ):
        status, answer, headers = call(url, path, body)
        assert (status, {*headers["allow"].split(", ")}) == (405, {*allowed.split(" or ")})
        assert answer == {"error": f"{path}: expected {allowed}, got {method}"}
    paths = "there is POST /v2/models/NAME/infer, and GET /v2/models/NAME, /v2/health/ready and /metrics"
    for path, body, asked in (
        ("/v1/models/scale:predict", b"{}", "POST /v1/models/scale:predict"),
        ("/", None, "GET /"),
    ):
        status, answer, _ = call(url, path, body)
        assert (status, answer["error"]) == (404, f"there is no {asked}; {paths}")
    assert infer(url, "scale", b"x" * 10_001)[0] == 413
    assert infer(url, "scale", b"x", **{"Content-Encoding": "br"})[:2] == (
        415,
        {"error": "Content-Encoding: expected gzip, deflate or identity, got 'br'"},
    )
    status, body, _ = infer(url, "scale", json_request(x=ROW), Origin="http://page")
    assert (status, body["error"]) == (403, "requests by web pages are refused, and this is by http://page")
    late = json.loads(json_request(x=ROW)) | {"parameters": {"timeout": "soon"}}
    status, body, _ = infer(url, "scale", json.dumps(late).encode())
    assert (status, body["error"]) == (
        400,
        "the request: parameter 'timeout': expected a whole number of microseconds, got 'soon'",
    )
    for path, sent in (("/v2/models/scale/infer", json_request(x=ROW)), ("/v2/models/scale", None), ("/v2", None)):
        status, body, _ = call(url, f"{path}?timeout=5", sent)
        text = "the query: expected none, got 'timeout=5'; parameters belong into the JSON"
        assert (status, body) == (400, {"error": text})


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("index", b"", 200),
        ("index", b'{"ready": true}', 200),
        ("index", b'{"redy": true}', "the request: unknown member 'redy'; did you mean ready?"),
        ("index", b"[]", "the request's JSON: expected an object, got a list"),
        ("models/scale/load", b"{}", 200),
        ("models/scale/load", b'{"parameters": {}}', 200),
        (
            "models/scale/load",
            b'{"parameters": {"config": "{}"}}',
            "the request: unknown parameter 'config'; another configuration of a model is not offered; leave it out",
        ),
        ("models/scale/load", b'{"parameters": {"file:1/a": ""}}', "unknown parameter 'file:1/a'; leave it out"),
        ("index", b" " * 70_000, "the request: expected at most 65536 bytes, got more"),
    ],
)
def test_members_of_repository_requests_are_honoured_or_refused(
    url: str, path: str, body: bytes, answer: int | str
) -> None:
    status, found, _ = call(url, f"/v2/repository/{path}", body)
    assert status == answer or answer in found["error"]


@pytest.mark.parametrize("is_binary", [False, True])
@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_requests_are_taken_and_answers_are_compressed_on_demand(
    url: str, encoding: str, compress: Any, is_binary: bool
) -> None:
    rows = np.arange(800, dtype=np.float32).reshape(2, 400)
    inputs = {"x": np.ones((1, 2), np.float32), "y": rows}
    body, headers = binary_request(**inputs) if is_binary else (json_request(**inputs), {})
    plain, _, found = infer(url, "pair.joined", body, **headers)
    assert (plain, "content-encoding" in found, found["vary"]) == (200, False, "Accept-Encoding")
    headers |= {"Content-Encoding": encoding, "Accept-Encoding": "deflate, gzip;q=0.5"}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v2/models/pair.joined/infer", compress(body), headers)
    with connection.getresponse() as answer:
        assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
        content = gzip.decompress(answer.read())
        size = int(answer.headers.get("Inference-Header-Content-Length", len(content)))
    connection.close()
    head, rest = json.loads(content[:size]), content[size:]
    data = np.frombuffer(rest, np.float32) if is_binary else np.array(head["outputs"][0]["data"])
    np.testing.assert_array_equal(data, rows.sum(0))


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (gzip.compress(b" " * 10_001), 413, "the request: expected at most 10000 bytes decompressed, as --max-bytes"),
        (gzip.compress(b" " * 9_000) * 2, 413, "the request: expected at most 10000 bytes decompressed"),
        (gzip.compress(b" " * 50_000_000), 413, "the request: expected at most 10000 bytes, as --max-bytes says"),
        (gzip.compress(json_request(x=ROW))[:-9], 400, "the request's compressed body: expected its end, got less"),
        (gzip.compress(json_request(x=ROW)) + b"more", 400, "the request's compressed body: Error -3"),
        (json_request(x=ROW), 400, "the request's compressed body: Error -3"),
        (gzip.compress(b"{") + gzip.compress(json_request(x=ROW)[1:]), 200, ""),
        (b"", 400, "the request's JSON: expected an object, got none, or not the whole"),
    ],
    # Not made of the bytes, which have the time.
    ids=["large", "large in parts", "larger than a body", "cut", "with a rest", "not compressed", "in parts", "empty"],
)
def test_compressed_requests_are_bounded_and_checked(url: str, body: bytes, status: int, text: str) -> None:
    found, answer, _ = infer(url, "scale", body, **{"Content-Encoding": "gzip"})
    assert (found, answer.get("error", "")[: len(text)]) == (status, text)


def test_many_members_are_decompressed_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    class Stream:
        def __init__(self, bits: int) -> None:
            self._stream = make(bits)

        def decompress(self, data: bytes, most: int) -> bytes:
            sizes.append(len(data))
            return self._stream.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

    make, members = zlib.decompressobj, 5_000
    body = gzip.compress(b"") * members + gzip.compress(b"data")
    monkeypatch.setattr(zlib, "decompressobj", Stream)
    assert decompressed(body, 4) == b"data"
    assert len(sizes) > members
    assert max(sizes) < len(body) / 10


@pytest.mark.parametrize(
    ("header", "takes"),
    [
        *((header, False) for header in (None, "", "identity", "br, gzip;q=0", "*;q=0", "gzip;q=x")),
        *((header, True) for header in ("gzip", "GZIP", "*", "deflate, gzip; q=0.1", "x-gzip")),
    ],
)
def test_a_header_says_whether_its_client_takes_gzip(header: str | None, takes: bool) -> None:
    assert takes_gzip(header) == takes


def test_a_host_that_an_attacker_points_here_is_refused(folder: Path) -> None:
    with served(folder / "scale", host_names=["Proxy.example"]) as server:
        for host in ("localhost:80", "127.0.0.1", "[::1]:9", "proxy.example"):
            assert call(server.url, "/v2", headers={"Host": host})[0] == 200
        for path, body in (("/v2", None), ("/metrics", None), ("/none", None), ("/v2/models/scale/infer", b"{}")):
            status, answer, _ = call(server.url, path, body, {"Host": "evil.example:80"})
            text = "Host: expected an IP address or one of localhost, proxy.example, got 'evil.example:80'"
            assert (status, answer["error"].partition(";")[0]) == (421, text)


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_too_large(url: str) -> None:
    status, body, _ = call(url, "/v2/models/scale/infer", iter([b"x" * 6000] * 2))  # type: ignore[arg-type]
    assert (status, body) == (413, {"error": "the request: expected at most 10000 bytes, as --max-bytes says"})


def test_metrics_count_requests_batches_and_errors(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(max_batch=4)) as server:
        infer(server.url, "scale", json_request(x=np.ones((3, 2), np.float32)))
        infer(server.url, "scale", json_request(y=ROW))
        infer(server.url, "other", json_request(y=ROW))
        lines = call(server.url, "/metrics")[1].decode().splitlines()
    for line in (
        'dflow_serve_requests_total{model="scale",status="200"} 1.0',
        'dflow_serve_requests_total{model="scale",status="400"} 1.0',
        'dflow_serve_requests_total{model="unknown",status="404"} 1.0',
        'dflow_serve_request_seconds_count{model="scale"} 2.0',
        'dflow_serve_batch_rows_sum{model="scale"} 3.0',
        'dflow_serve_queue_seconds_count{model="scale"} 1.0',
        'dflow_serve_waiting_requests{model="scale"} 0.0',
        'dflow_serve_version{model="scale"} 1.0',
    ):
        assert line in lines


def test_a_fault_of_the_server_is_answered_in_json_and_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("no more")

    with served(folder / "scale") as server:
        monkeypatch.setattr(http_api, "decode_request", fail)
        monkeypatch.setattr(http_api, "__version__", {fail})
        answer = {"error": "the server failed; its log has the reason"}
        assert infer(server.url, "scale", json_request(x=ROW))[:2] == (500, answer)
        assert call(server.url, "/v2")[:2] == (500, answer)
        lines = call(server.url, "/metrics")[1].decode().splitlines()
    assert 'dflow_serve_requests_total{model="scale",status="500"} 1.0' in lines
    assert [record.getMessage() for record in caplog.records if record.name == "dflow"] == [
        "POST /v2/models/scale/infer failed",
        "GET /v2 failed",
    ]


def test_a_server_with_too_many_requests_in_progress_refuses_more(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(max_queue=1)) as server:
        held = HeldCalls(server)
        first = held.ask_first()
        status, body, headers = infer(server.url, "scale", json_request(x=ROW))
        assert (status, headers["retry-after"]) == (503, "1")
        assert body == {"error": "the server has 1 requests in progress, the most"}
        held.release()
        assert first.result(60)[0] == 200


def test_large_bodies_are_decoded_and_encoded_on_another_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def noted(fn: Any) -> Any:
        return lambda *arguments: threads.add(threading.current_thread().name) or fn(*arguments)

    for name in ("decode_request", "encode_response"):
        monkeypatch.setattr(http_api, name, noted(getattr(http_api, name)))
    with served(folder / "scale") as server:
        assert infer(server.url, "scale", json_request(x=ROW))[0] == 200
        assert threads == {"dflow serve http"}
        threads.clear()
        rows = np.ones((300_000, 2), np.float32)
        status, answer, _ = infer(server.url, "scale", json_request(x=rows))
        assert (status, answer["outputs"][0]["data"]) == (200, [2.0] * 600_000)
        assert threads
        assert "dflow serve http" not in threads


def test_the_bytes_in_progress_are_bounded(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(max_bytes=200)) as server:
        held = HeldCalls(server)
        body = json_request(x=ROW).ljust(200)
        asked = [held.ask(body) for _ in range(4)]
        until(lambda: sum(server._service._bytes.values()) == 800)
        status, answer, headers = infer(server.url, "scale", json_request(x=ROW))
        assert (status, headers["retry-after"]) == (503, "1")
        assert answer == {"error": "the server has 800 bytes of requests in progress, the most"}
        held.release()
        assert [one.result(60)[0] for one in asked] == [200] * 4
        assert infer(server.url, "scale", body)[0] == 200


def test_a_request_that_does_not_arrive_is_given_up(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(timeout_s=0.05)) as server:
        where = urlsplit(server.url)
        with socket.create_connection((str(where.hostname), int(where.port or 0)), timeout=60) as slow:
            slow.sendall(b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_stop_answers_what_was_taken_and_refuses_what_comes(folder: Path) -> None:
    with served(folder / "scale") as server:
        held = HeldCalls(server)
        first = held.ask_first()
        stopping = held.later(server.stop)
        until(lambda: call(server.url, "/v2/health/ready")[0] == 503)
        assert call(server.url, "/v2/health/live")[0] == 200
        status, body, headers = infer(server.url, "scale", json_request(x=ROW))
        assert (status, body, headers["retry-after"]) == (503, {"error": "the server is stopping"}, "1")
        held.release()
        assert (first.result(60)[0], stopping.result(60)) == (200, True)
        with pytest.raises(ConnectionRefusedError):
            call(server.url, "/v2/health/live")


def test_a_stop_answers_what_was_taken_before_the_loop_knew_of_it(folder: Path) -> None:
    with served(folder / "scale") as server:
        held, real = HeldCalls(server), server._loop
        asked: list[Any] = []

        class LateLoop:
            """The loop takes a request before it learns of the stop, and after the stop has looked for requests."""

            def call_soon_threadsafe(self, call: Any, *arguments: Any) -> None:
                if call is setattr:
                    held.later(lambda: (looked.wait(1), asked.append(held.ask_first()), tell(call, *arguments)))
                else:
                    looked.set()
                    until(lambda: bool(asked))
                    tell(call, *arguments)

        looked, tell = threading.Event(), real.call_soon_threadsafe
        server._loop = LateLoop()  # type: ignore[assignment]
        stopping = held.later(server.stop)
        until(lambda: server._service.is_stopping)
        server._loop = real
        held.release()
        assert stopping.result(60)
        assert asked[0].result(60)[0] == 200


def test_beyond_loopback_clients_need_a_certificate(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    anywhere, here = TcpAddress("0.0.0.0", 0), TcpAddress("127.0.0.1", 0)
    with pytest.raises(SecurityError, match=r"address '0.0.0.0:0' is not a loopback address"):
        ModelServer(folder, anywhere, ServingSettings(), SameMachine())
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("s" * 64)
    with pytest.raises(ConfigError, match="serve: expected certificates, got a shared secret"):
        ModelServer(folder, here, ServingSettings(), SharedSecret(secret))
    init_authority(tmp_path / "authority", days=2)
    for name in ("server:0", "client:0"):
        issue_to(tmp_path / "authority", [name], ["127.0.0.1"], days=1)
    certificates = tmp_path / "authority" / "server-0"
    policy = MutualTls.in_folder(certificates)
    with ModelServer(folder / "scale", here, ServingSettings(), policy, poll_s=0) as server:
        where = urlsplit(server.url)
        assert where.scheme == "https"
        for own in (None, tmp_path / "authority" / "client-0"):
            context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
            if own is not None:
                context.load_cert_chain(own / "cert.pem", own / "key.pem")
            refused = pytest.raises(OSError, match=r"certificate required|reset|closed connection")
            client = http.client.HTTPSConnection(where.netloc, context=context, timeout=60)
            with closing(client), refused if own is None else nullcontext():
                client.request("GET", "/v2/health/live", headers={"Host": "a.name.of.the.certificate"})
                assert client.getresponse().status == 200
    with pytest.raises(ConfigError, match="--host-name is for a server without certificates"):
        ModelServer(folder, here, ServingSettings(), policy, host_names=["a"])
