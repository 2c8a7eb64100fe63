"""Connections that fail or stall end while others are served, and ids as they are reach loaded functions."""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.cli.certs import init_authority, issue_to
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.model_server import ModelServer
from dflow.serving.served_version import ServingSettings
from dflow.tracing.errors import SignatureError
from tests.dflow.serving.inference_client import binary_request, call, infer, json_request
from tests.dflow.serving.small_exports import scale, served
from tests.distributed.waiting import until

pytestmark = pytest.mark.once

ROW = json_request(x=np.ones((1, 2), np.float32))
DEADLINE_S = 30.0
#: Limits that the tests reach soon.
SHORT = ConnectionLimits(request_s=0.2, body_s=0.2, answer_s=0.2)
INFER = b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scale(tmp_path_factory.mktemp("models") / "scale", 2)


@pytest.fixture(scope="module")
def usual(folder: Path) -> Iterator[ModelServer]:
    with served(folder) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[ModelServer]:
    with served(folder, limits=SHORT) as server:
        yield server


def connect(server: ModelServer) -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((str(where.hostname), int(where.port or 0)), timeout=DEADLINE_S)


def is_ended(sock: socket.socket) -> bool:
    """Return whether the server has ended a connection, after reading what it sent."""
    sock.setblocking(False)
    try:
        return not sock.recv(1 << 20)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v2/models/scale/infer HTTP/1.1\r\nHost: local",
        INFER + b"Content-Length: 100\r\n\r\n{",
        INFER + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        # Answered immediately, without the body.
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        INFER + b"Content-Length: 999999999999\r\n\r\n{",
    ],
)
def test_a_connection_that_waits_for_its_client_ends(hasty: ModelServer, begun: bytes) -> None:
    with connect(hasty) as slow:
        slow.sendall(begun)
        until(lambda: is_ended(slow))


def test_bytes_that_trickle_prolong_nothing(hasty: ModelServer) -> None:
    """Neither a head, nor a body before or after its answer."""
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(hasty)) for _ in range(3)]
        slow[0].sendall(b"GET / HTTP/1.1\r\nA: ")
        slow[1].sendall(INFER + b"Content-Length: 10000\r\n\r\n")
        slow[2].sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n")

        def have_ended() -> bool:
            for sock in slow:
                sock.setblocking(True)
                with suppress(OSError):
                    sock.sendall(b"a")
            return all(map(is_ended, slow))

        until(have_ended)


def test_a_client_that_does_not_read_its_answer_is_left(tmp_path: Path) -> None:
    dflow.export(lambda x: jnp.broadcast_to(x, (4_000_000,)), dflow.spec("", jnp.float32)).save(tmp_path / "wide")
    body, headers = binary_request(x=np.float32(1))
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Content-Length": len(body)}.items())
    with served(tmp_path / "wide", limits=SHORT) as server, connect(server) as client:
        client.sendall(f"POST /v2/models/wide/infer HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode() + body)
        until(lambda: bool(server._server.server_state.connections))
        until(lambda: not server._server.server_state.connections)


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /v2 HTTP/1.1\r\nA: ",
        b"GET /",
        b"GET /v2 HTTP/1.1\r\n" + b"A: b\r\n" * 8000 + b"\r\n",
        INFER + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nTrailer: ",
        INFER + b"Transfer-Encoding: chunked\r\n\r\n1;extension=",
    ],
)
def test_what_is_beside_a_body_is_bounded(usual: ModelServer, begun: bytes) -> None:
    with connect(usual) as client:
        client.sendall(begun)
        received = bytearray()

        def is_refused() -> bool:
            client.setblocking(True)
            with suppress(OSError):
                client.sendall(b"a" * 65536)
            client.setblocking(False)
            try:
                received.extend(client.recv(1 << 20))
            except BlockingIOError:
                return False
            except OSError:
                return True
            return True

        until(is_refused)
        assert received.startswith(b"HTTP/1.1 431 "), received[:300]
        assert b"path and headers: expected at most 32768 bytes, got more" in received
    assert infer(usual.url, "scale", ROW)[0] == 200


def test_bytes_that_are_no_request_are_answered_in_json_and_logged_rarely(
    usual: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        with connect(usual) as client:
            client.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            answer = client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b'{"error": "expected a request of HTTP/1.1, got other bytes"}')
    with connect(usual) as client:  # ended also if the client does not
        client.sendall(b"no HTTP\r\n\r\n")
        client.settimeout(8.0)
        assert [bool(client.recv(4096)), client.recv(4096)] == [True, b""]
    assert 0 < len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 20


UPGRADE = b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
SIZED = b"Content-Length: %d\r\n" % len(ROW)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        # Java's client and curl --http2 offer HTTP/2.
        (INFER + UPGRADE + SIZED + b"\r\n" + ROW, [200]),
        ((INFER + UPGRADE + SIZED + b"\r\n" + ROW) * 3, [200] * 3),
        (INFER + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(ROW) + ROW + b"\r\n0\r\n\r\n", [200]),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", [200]),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", [405]),
        ((INFER + SIZED + b"\r\n" + ROW) * 3, [200] * 3),
        (INFER + b"Expect: 100-continue\r\n" + SIZED + b"\r\n" + ROW, [100, 200]),
        (b"POST /v2/models/scale/infer/ HTTP/1.1\r\nHost: localhost\r\n" + SIZED + b"\r\n" + ROW, [200]),
        # A probe of HAProxy.
        (b"GET /v2/health/ready HTTP/1.0\r\n\r\n", [200]),
        (b"HEAD /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n", [200]),
        (b"GET /v2 HTTP/1.1\r\n\r\n", [421]),
        # A request before the bytes that are none gets its own answer.
        (INFER + SIZED + b"\r\n" + ROW + b"\x00\x01 no request\r\n\r\n", [200]),
        (INFER + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n", [400]),
        (INFER + SIZED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [400]),
        (INFER + SIZED + b"Content-Length: 3\r\n\r\n" + ROW, [400]),
    ],
)
@pytest.mark.parametrize("piece", [7, 10_000])
def test_requests_as_clients_and_proxies_send_them(
    usual: ModelServer, sent: bytes, statuses: list[int], piece: int
) -> None:
    received = bytearray()

    def found() -> list[int]:
        with suppress(BlockingIOError, ConnectionError):
            received.extend(client.recv(1 << 20))
        return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+) ", received)]

    with connect(usual) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The server ends the connection at the first bytes that are no request, whether or not more are on their way.
        with suppress(ConnectionError):
            for start in range(0, len(sent), piece):
                client.sendall(sent[start : start + piece])
        client.setblocking(False)
        until(lambda: len(found()) >= len(statuses))
        assert found() == statuses


def test_a_connection_stays_open_between_requests(folder: Path) -> None:
    """Longer than a head may take: proxies keep connections for a minute."""
    with served(folder, limits=replace(SHORT, idle_s=30.0)) as server, connect(server) as kept:
        for _ in range(2):
            kept.sendall(INFER + SIZED + b"\r\n" + ROW)
            assert kept.recv(4096).startswith(b"HTTP/1.1 200 ")
            with connect(server) as silent:
                until(partial(is_ended, silent))
        # The head of a later request has the time of a first one.
        kept.sendall(b"GET /v2 HTTP/1.1\r\nHo")
        until(lambda: is_ended(kept))
    with served(folder, limits=replace(SHORT, idle_s=0.2)) as server, connect(server) as kept:
        kept.sendall(INFER + SIZED + b"\r\n" + ROW)
        until(lambda: is_ended(kept))


def test_silent_connections_leave_room_for_others(folder: Path) -> None:
    limits = ConnectionLimits(waiting=4, connections=5)
    with served(folder, limits=limits) as server, ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(12)]
        until(lambda: sum(map(is_ended, silent)) == 8)
        assert infer(server.url, "scale", ROW)[0] == 200
        # Connections with a request are kept, and those beyond their number are refused.
        answers = []
        for _ in range(6):  # each sends its request before the next one arrives, which may end one without
            kept = stack.enter_context(connect(server))
            kept.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers.append(kept.recv(4096))
        assert [answer.startswith(b"HTTP/1.1 200 ") for answer in answers] == [True] * 5 + [False]
        assert b'{"error":"the server has 5 connections, the most; try again"}' in answers[-1]


def test_bodies_that_stall_shut_out_no_others(folder: Path) -> None:
    with served(folder, ServingSettings(max_queue=2)) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(server)).sendall(INFER + b"Content-Length: 100\r\n\r\n{")
        until(lambda: server._service.in_progress == 5)
        assert infer(server.url, "scale", ROW)[0] == 200


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """Allow this process `count` more open files than it has."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_server_raises_its_limit_of_open_files(folder: Path) -> None:
    with few_files(60):
        low = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        with served(folder) as server:
            assert infer(server.url, "scale", ROW)[0] == 200
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > low


def test_silent_clients_without_a_certificate_shut_nobody_out(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    init_authority(tmp_path / "ca", days=2)
    issue_to(tmp_path / "ca", ["server:0", "client:0"], ["127.0.0.1"], days=1)
    own = next((tmp_path / "ca").glob("server-0*"))
    context = ssl.create_default_context(cafile=str(own / "ca.pem"))
    context.load_cert_chain(own / "cert.pem", own / "key.pem")
    limits = ConnectionLimits(request_s=0.5, waiting=4)
    with (
        ModelServer(
            folder, TcpAddress("127.0.0.1", 0), ServingSettings(), MutualTls.in_folder(own), poll_s=0, limits=limits
        ) as server,
        ExitStack() as stack,
    ):
        silent = [stack.enter_context(connect(server)) for _ in range(12)]
        until(lambda: sum(map(is_ended, silent)) == 8)
        client = stack.enter_context(context.wrap_socket(connect(server), server_hostname="127.0.0.1"))
        client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        until(lambda: all(map(is_ended, silent)))


USERS, ITEMS = ["anna", "björn", 'a,"b"],['], np.array([2**40 + 1, -1, 7])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray[Any, Any]]:
    """A folder with a model of names and numbers, which knows those above, and its answers to them."""
    table = dflow.Embedding(64, 4, vocabulary=dflow.Vocabulary(), shards=2, name="ids of requests")
    optimizer = dflow.Optimizer(optax.sgd(0.1), [table], name="optimizer")

    @dflow.jit
    def learn(users: Any, items: Any) -> None:
        found = [table.find(users), table.find(items)]

        def loss() -> Any:
            return (table(found[0]) * table(found[1])).sum()

        optimizer.apply(dflow.grad(loss, [table])(), found=found)

    def score(user: Any, item: Any, *, scale: Any) -> Any:
        return {"score": (table(user) * table(item)).sum(-1) * scale}

    for _ in range(3):
        learn(USERS, ITEMS)
    folder = tmp_path_factory.mktemp("models")
    number = dflow.spec("b", jnp.float32)
    dflow.export(score, dflow.spec("b", np.str_), dflow.spec("b", np.int64), scale=number).save(folder / "score")
    return folder, np.asarray(score(USERS, ITEMS, scale=np.ones(3, np.float32))["score"])


@pytest.fixture(scope="module")
def server(trained: tuple[Path, Any]) -> Iterator[Any]:
    options = {"grpc": TcpAddress("127.0.0.1", 0)} if find_spec("grpc") else {}
    with served(trained[0], ServingSettings(max_batch=4), **options) as made:
        yield made


def test_a_loaded_function_takes_ids_as_they_are(trained: tuple[Path, Any]) -> None:
    folder, scores = trained
    loaded = dflow.load(folder / "score")
    assert "score(user: str[b], item: id64[b], *, scale: f32[b]) -> {'score': f32[b]}" in str(loaded)
    ones = np.ones(3, np.float32)
    for users in (USERS, np.array(USERS), np.array([user.encode() for user in USERS], object)):
        for items in (ITEMS, dflow.wide_ids(ITEMS)):
            np.testing.assert_allclose(loaded(users, items, scale=ones)["score"], scores, atol=1e-6)
    np.testing.assert_allclose(loaded(USERS[:1], np.array([7]), scale=ones[:1])["score"].shape, (1,))
    assert loaded([], ITEMS[:0], scale=ones[:0])["score"].shape == (0,)
    for users, items, message in (
        (ITEMS, ITEMS, r"user: expected str\[b\], got integers"),
        (USERS, USERS, r"item: expected id64\[b\], got strings"),
        ([USERS] * 3, ITEMS, r"exported for user: u32\[b\], and called with u32\[3,3\]"),
        (USERS[:2], ITEMS, "inconsistent sizes"),
    ):
        with pytest.raises(SignatureError, match=message):
            loaded(users, items, scale=ones)
    with pytest.raises(dflow.InputError, match=r"argument 'user': .*got None at \(1,\)"):
        loaded(["anna", None, "b"], ITEMS, scale=ones)


def test_an_export_that_uses_ids_as_numbers_is_refused() -> None:
    plain = dflow.Embedding(9, 2, name="plain ids")
    for dtype, use in (
        (np.int64, plain),
        (np.str_, plain),
        (np.int64, lambda ids: ids + 1),
        (np.str_, lambda ids: ids),
    ):
        with pytest.raises(dflow.InputError, match=r"argument '(ids|a)': expected"):
            dflow.export(use, dflow.spec("b", dtype))


def tensor(name: str, datatype: str, values: Any, **parameters: Any) -> dict[str, Any]:
    data = {"parameters": parameters} if parameters else {"data": values}
    return {"name": name, "datatype": datatype, "shape": [len(values)], **data}


def strings(values: Any) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in (value.encode() for value in values))


def test_requests_have_ids_as_they_are(server: Any, trained: tuple[Path, Any]) -> None:
    scale = tensor("scale", "FP32", [1.0] * 3)
    _, model, _ = call(server.url, "/v2/models/score")
    assert [(one["name"], one["datatype"], one["shape"]) for one in model["inputs"]] == [
        ("user", "BYTES", [-1]),
        ("item", "INT64", [-1]),
        ("scale", "FP32", [-1]),
    ]
    inputs = [tensor("user", "BYTES", USERS), tensor("item", "INT64", ITEMS.tolist()), scale]
    status, body, _ = infer(server.url, "score", json.dumps({"inputs": inputs}).encode())
    assert status == 200, body
    np.testing.assert_allclose(body["outputs"][0]["data"], trained[1], atol=1e-6)
    blob = strings(USERS) + ITEMS.tobytes()
    sizes = len(strings(USERS)), ITEMS.nbytes
    inputs = [
        tensor("user", "BYTES", USERS, binary_data_size=sizes[0]),
        tensor("item", "INT64", ITEMS, binary_data_size=sizes[1]),
        scale,
    ]
    head = json.dumps({"inputs": inputs}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    status, body, _ = infer(server.url, "score", head + blob, **headers)
    assert status == 200, body
    np.testing.assert_allclose(body["outputs"][0]["data"], trained[1], atol=1e-6)
    cut = json.dumps({"inputs": [tensor("user", "BYTES", USERS, binary_data_size=9), *inputs[1:]]}).encode()
    cut_headers = {"Inference-Header-Content-Length": str(len(cut))}
    status, body, _ = infer(server.url, "score", cut + strings(USERS)[:9] + ITEMS.tobytes(), **cut_headers)
    assert (status, body["error"][:42]) == (400, "input 'user': expected 3 strings, each aft")


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (tensor("user", "BYTES", ["a", "b"]), "input 'item': expected 2 for b, as 'user' has, got 3"),
        ({**tensor("user", "BYTES", ["a", "b"]), "shape": [3]}, "input 'user': expected 3 values for its shape [3]"),
    ],
)
def test_a_wrong_number_of_strings_names_the_input(server: Any, user: Any, message: str) -> None:
    inputs = [user, tensor("item", "INT64", ITEMS.tolist()), tensor("scale", "FP32", [1.0] * 3)]
    status, body, _ = infer(server.url, "score", json.dumps({"inputs": inputs}).encode())
    assert (status, body["error"][: len(message)]) == (400, message)


def test_grpc_has_ids_as_they_are(server: Any, trained: tuple[Path, Any]) -> None:
    triton = pytest.importorskip("tritonclient.grpc")
    given = [("user", "BYTES", np.array(USERS, object)), ("item", "INT64", ITEMS), ("scale", "FP32", np.ones(3, "f4"))]
    inputs = [triton.InferInput(name, array.shape, datatype) for name, datatype, array in given]
    for one, (_, _, array) in zip(inputs, given, strict=True):
        one.set_data_from_numpy(array)
    with closing(triton.InferenceServerClient(str(server.grpc_address))) as client:
        found = client.infer("score", inputs).as_numpy("score")
    np.testing.assert_allclose(found, trained[1], atol=1e-6)
