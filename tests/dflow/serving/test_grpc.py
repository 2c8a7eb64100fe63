"""gRPC of the Open Inference Protocol: answers beside HTTP's, refusals, limits, the stop, certificates.

The clients are Triton's, and raw calls with its generated messages, which share no code with the server.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dflow
from dflow.cli.certs import init_authority, issue_to
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SameMachine
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.grpc_messages import MESSAGES, SERVICE
from dflow.serving.grpc_tensors import decode_message
from dflow.serving.model_server import ModelServer
from dflow.serving.request_members import RefusedRequest
from dflow.serving.served_version import ServingSettings
from dflow.tracing.errors import SecurityError
from tests.dflow.serving.inference_client import call, infer, json_request
from tests.dflow.serving.small_exports import HeldCalls, scale, served
from tests.distributed.waiting import until

pytestmark = pytest.mark.once
grpc = pytest.importorskip("grpc")
triton = pytest.importorskip("tritonclient.grpc")

ANY_PORT = TcpAddress("127.0.0.1", 0)
ROW = np.array([[1, 2]], np.float32)
#: The field of typed contents by dtype; the others are sent as bytes alone.
CONTENTS = {
    "bool": "bool_contents",
    **dict.fromkeys(("int8", "int16", "int32"), "int_contents"),
    **dict.fromkeys(("uint8", "uint16", "uint32"), "uint_contents"),
    "float32": "fp32_contents",
}
DTYPES = (*CONTENTS, "float16", "bfloat16")
NAMES = {"bool": "BOOL", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models: `scale`, of one function, and `same`, whose functions return their inputs."""
    place = tmp_path_factory.mktemp("models")
    shape = dflow.spec("b, 3", jnp.float32).shape
    all, numbers = ({name: jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name in of} for of in (DTYPES, CONTENTS))
    dflow.export({"all": (lambda arrays: arrays, all), "typed": (lambda arrays: arrays, numbers)}).save(
        place / "same" / "7"
    )
    scale(place / "scale" / "1", 2)
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ModelServer]:
    """A server of all, for requests of at most 10,000 bytes."""
    with served(folder, ServingSettings(max_bytes=10_000), grpc=ANY_PORT) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[Any]:
    with closing(triton.InferenceServerClient(str(server.grpc_address))) as client:
        yield client


def tensor(name: str, array: Any) -> Any:
    array = np.asarray(array)
    one = triton.InferInput(name, list(array.shape), NAMES.get(array.dtype.name, array.dtype.name.upper()))
    one.set_data_from_numpy(array)
    return one


def raw_call(server: ModelServer, method: str, body: Any) -> Any:
    """Send a message, or bytes, and return the response as a message."""
    with grpc.insecure_channel(str(server.grpc_address)) as channel:
        sent = body if isinstance(body, bytes) else body.SerializeToString()
        answer = channel.unary_unary(f"/{SERVICE}/{method}")(sent, timeout=60)
    return getattr(triton.service_pb2, f"{method}Response").FromString(answer)


def refusal(server: ModelServer, method: str, body: Any) -> tuple[str, str]:
    """Return the status and the text that refuse a message."""
    with pytest.raises(grpc.RpcError) as raised:
        raw_call(server, method, body)
    return raised.value.code().name, raised.value.details()


def request(model: str = "scale", **inputs: Any) -> Any:
    """Return a request with typed contents; `inputs` are the fields of each input besides its name."""
    tensors = [{"name": name, **fields} for name, fields in inputs.items()]
    return triton.service_pb2.ModelInferRequest(model_name=model, inputs=tensors)


def typed(shape: list[int], values: Any, datatype: str = "FP32", field: str = "fp32_contents") -> dict[str, Any]:
    return {"datatype": datatype, "shape": shape, "contents": {field: values}}


ONE_ROW = request(x=typed([1, 2], [1, 2]))


def test_messages_are_those_of_the_protocol() -> None:
    def fields(message: Any) -> dict[str, Any]:
        own = {
            one.full_name: (
                one.number,
                one.type,
                one.is_repeated,
                one.message_type and (one.message_type.full_name, one.message_type.GetOptions().map_entry),
                one.containing_oneof and one.containing_oneof.name,
            )
            for one in message.fields
        }
        return own | {name: of for inner in message.nested_types for name, of in fields(inner).items()}

    published = triton.service_pb2.DESCRIPTOR
    assert published.services_by_name["GRPCInferenceService"].full_name == SERVICE
    for name, message in MESSAGES.items():
        assert fields(message.DESCRIPTOR) == fields(published.message_types_by_name[name])


def test_every_dtype_goes_there_and_back_in_both_forms(client: Any, server: ModelServer) -> None:
    random = np.random.default_rng(0)
    dtypes = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in DTYPES}
    arrays = {name: random.integers(0, 2 if name == "bool" else 100, (2, 3)).astype(dtypes[name]) for name in DTYPES}
    outputs = [triton.InferRequestedOutput(name) for name in DTYPES]
    inputs = [tensor(f"arrays[{name!r}]", array) for name, array in arrays.items()]
    result = client.infer("same.all", inputs, "7", outputs, request_id="r1")
    head = result.get_response()
    assert (head.id, head.model_name, head.model_version) == ("r1", "same.all", "7")
    for name, array in arrays.items():
        assert result.as_numpy(name).dtype == array.dtype
        np.testing.assert_array_equal(result.as_numpy(name), array)
    asked = {
        f"arrays[{name!r}]": typed([2, 3], arrays[name].reshape(-1).tolist(), NAMES.get(name, name.upper()), field)
        for name, field in CONTENTS.items()
    }
    answer = raw_call(server, "ModelInfer", request("same.typed", **asked))
    assert not answer.raw_output_contents
    for output in answer.outputs:
        values = getattr(output.contents, CONTENTS[output.name])
        assert (list(values), list(output.shape)) == (arrays[output.name].reshape(-1).tolist(), [2, 3])


def test_answers_are_those_of_http_also_without_rows_and_in_large(folder: Path) -> None:
    large = np.arange(600_000, dtype=np.float32).reshape(-1, 2)
    with served(folder / "scale", grpc=ANY_PORT) as server:
        with closing(triton.InferenceServerClient(str(server.grpc_address))) as client:
            for rows in (ROW, ROW[:0], large):
                _, by_http, _ = infer(server.url, "scale", json_request(x=rows))
                by_grpc = client.infer("scale", [tensor("x", rows)]).as_numpy("result")
                assert by_grpc.shape == rows.shape
                assert by_grpc.reshape(-1).tolist() == by_http["outputs"][0]["data"]
        long = raw_call(server, "ModelInfer", request(x=typed([300_000, 2], large.reshape(-1))))
        np.testing.assert_array_equal(long.outputs[0].contents.fp32_contents, 2 * large.reshape(-1))


def test_health_metadata_and_the_repository(folder: Path, tmp_path: Path) -> None:
    scale(tmp_path / "scale" / "1", 2)
    (tmp_path / "scale" / "3").mkdir()
    (tmp_path / "scale" / "3" / "manifest.json").write_text("no")
    with (
        served(tmp_path / "scale", grpc=ANY_PORT) as server,
        closing(triton.InferenceServerClient(str(server.grpc_address))) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert [client.is_model_ready("scale", version) for version in ("", "1", "2")] == [True, True, False]
        assert not client.is_model_ready("other")
        assert client.get_server_metadata(as_json=True) == {"name": "dflow", "version": dflow.__version__}
        found = client.get_model_metadata("scale")
        assert (found.name, list(found.versions), found.platform) == ("scale", ["1"], "dflow")
        [x] = found.inputs
        assert (x.name, x.datatype, list(x.shape)) == ("x", "FP32", [-1, 2])
        by_http = call(server.url, "/v2/repository/index", b"")[1]
        models = client.get_model_repository_index().models
        assert [{"name": one.name, "version": one.version, "state": one.state} for one in models] == [
            {key: one[key] for key in ("name", "version", "state")} for one in by_http
        ]
        assert (
            len(raw_call(server, "RepositoryIndex", triton.service_pb2.RepositoryIndexRequest(ready=True)).models) == 1
        )
        dflow.load(folder / "scale" / "1").save(tmp_path / "scale" / "4")
        client.load_model("scale")
        assert list(client.get_model_metadata("scale").versions) == ["4"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (request(x=typed([1, 3], [1, 2, 3])), "INVALID_ARGUMENT", "input 'x': expected FP32[b,2], got FP32[1, 3]"),
        (request(x=typed([1, 2], [1, 2, 3])), "INVALID_ARGUMENT", "input 'x': expected 2 values for its shape"),
        (
            request(x=typed([1, 2], [1, 2], "FP64")),
            "INVALID_ARGUMENT",
            "input 'x': expected fp64_contents for FP64, got fp32_contents",
        ),
        (
            request(x=typed([1, 2], [1, 300], "INT8", "int_contents")),
            "INVALID_ARGUMENT",
            "input 'x': expected numbers that INT8 can hold, got a larger one",
        ),
        (
            request(x=typed([1, 2], [], "BF16", "fp32_contents")),
            "INVALID_ARGUMENT",
            "input 'x': expected raw_input_contents, the only form of BF16",
        ),
        (request(x=typed([1, -2], [1])), "INVALID_ARGUMENT", "input 'x': expected a shape of sizes from 0, got [1"),
        (request(x={"datatype": "TEXT"}), "INVALID_ARGUMENT", "input 'x': expected a datatype of BOOL, "),
        (request(), "INVALID_ARGUMENT", "scale: expected the inputs x, got none"),
        (request("same"), "NOT_FOUND", "model 'same' has several functions; name one: same.all, same.typed"),
        (request("o" * 5000), "NOT_FOUND", "there is no model 'oooo"),
        (b"\xff\xff", "INVALID_ARGUMENT", "expected the message ModelInferRequest, got other bytes"),
        (b"\0" * 10_001, "RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (10001 vs. 10000)"),
    ],
)  # fmt: skip
def test_a_bad_request_is_refused_with_a_status_and_a_text(
    server: ModelServer, body: Any, status: str, text: str
) -> None:
    found = refusal(server, "ModelInfer", body)
    assert found[0] == status
    assert found[1].startswith(text)


def test_a_message_that_names_very_many_outputs_is_refused_before_they_are_decoded() -> None:
    message = MESSAGES["ModelInferRequest"].FromString(b"\x32\0" * 10_001)
    with pytest.raises(RefusedRequest, match="outputs: expected at most 10000, got 10001"):
        decode_message(message)


def test_a_request_without_a_message_is_refused(server: ModelServer) -> None:
    text = "at most 10000 bytes, as --max-bytes says, got none"
    with grpc.insecure_channel(str(server.grpc_address)) as channel, pytest.raises(grpc.RpcError, match=text):
        channel.stream_unary(f"/{SERVICE}/ModelInfer")(iter(()), timeout=60)


def test_members_that_are_not_offered_are_refused(server: ModelServer) -> None:
    def changed(**fields: Any) -> Any:
        message = request(x=typed([1, 2], [1, 2]))
        message.MergeFrom(triton.service_pb2.ModelInferRequest(**fields))
        return message

    wanted = {"name": "result", "parameters": {"classification": {"int64_param": 3}}}
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
    for fields, status, text in (
        ({"model_version": "2"}, "NOT_FOUND", "model 'scale': expected version 1, which is served, got 2"),
        ({"outputs": [{"name": "y"}]}, "INVALID_ARGUMENT", "output 'y': expected one of result"),
        ({"outputs": [wanted]}, "INVALID_ARGUMENT", "output 'result': parameter 'classification': expected 0, got 3"),
        ({"inputs": [x]}, "INVALID_ARGUMENT", "input 'x': expected once, got twice"),
        ({"raw_input_contents": [b"", b""]}, "INVALID_ARGUMENT", "raw_input_contents: expected one entry for each"),
        ({"raw_input_contents": [b"a"]}, "INVALID_ARGUMENT", "input 'x': expected raw_input_contents or contents, got"),
        ({"parameters": {"prioriti": {"int64_param": 3}}}, "INVALID_ARGUMENT", "the request: unknown parameter"),
        ({"parameters": {"timeout": {}}}, "INVALID_ARGUMENT", "the request: parameter 'timeout': expected a whole"),
        ({"parameters": {"timeout": {"int64_param": 1}}}, "DEADLINE_EXCEEDED", "the request's deadline passed"),
    ):  # fmt: skip
        found = refusal(server, "ModelInfer", changed(**fields))
        assert found[0] == status
        assert found[1].startswith(text)
    for method, fields in (("RepositoryIndex", {}), ("RepositoryModelLoad", {"model_name": "scale"})):
        asked = getattr(triton.service_pb2, f"{method}Request")(repository_name="a", **fields)
        assert refusal(server, method, asked) == (
            "INVALID_ARGUMENT",
            "repository_name: expected none, got 'a'; leave it out",
        )
    assert refusal(server, "ModelMetadata", triton.service_pb2.ModelMetadataRequest(name="other"))[0] == "NOT_FOUND"


def test_a_compressed_request_is_bounded_before_and_after(client: Any) -> None:
    row = [tensor("x", ROW)]
    assert client.infer("scale", row, compression_algorithm="gzip").as_numpy("result").tolist() == [[2, 4]]
    with pytest.raises(triton.InferenceServerException, match="Decompressed message larger than max") as raised:
        client.infer("scale", [tensor("x", np.zeros((10_000, 2), np.float32))], compression_algorithm="gzip")
    assert raised.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_requests_are_counted_and_limited_with_those_of_http(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(max_queue=1, timeout_s=60), grpc=ANY_PORT) as server:
        held = HeldCalls(server)
        first = held.ask_first()
        text = "the server has 1 requests in progress, the most"
        assert refusal(server, "ModelInfer", ONE_ROW) == ("UNAVAILABLE", text)
        held.release()
        assert first.result(60)[0] == 200
        raw_call(server, "ModelInfer", ONE_ROW)
        refusal(server, "ModelInfer", request())
        lines = call(server.url, "/metrics")[1].decode().splitlines()
    for line in (
        'dflow_serve_requests_total{model="scale",status="200"} 1.0',
        'dflow_serve_requests_total{model="scale",status="OK"} 1.0',
        'dflow_serve_requests_total{model="scale",status="INVALID_ARGUMENT"} 1.0',
        'dflow_serve_requests_total{model="unknown",status="UNAVAILABLE"} 1.0',
        'dflow_serve_batch_rows_sum{model="scale"} 2.0',
    ):
        assert line in lines


def test_a_request_that_does_not_arrive_is_given_up(folder: Path) -> None:
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(60)
        yield b""

    with served(folder / "scale", ServingSettings(timeout_s=0.05), grpc=ANY_PORT) as server:
        with grpc.insecure_channel(str(server.grpc_address)) as channel:
            for method in ("ModelInfer", "ServerLive"):
                with pytest.raises(grpc.RpcError) as raised:
                    channel.stream_unary(f"/{SERVICE}/{method}")(never(), timeout=60)
                assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert raised.value.details() == "the request did not arrive within 0.05 s"
        over.set()


def test_a_connection_has_limited_requests_and_metadata(folder: Path) -> None:
    limits = ConnectionLimits(streams=7, head_bytes=20_000)
    with served(folder / "scale", grpc=ANY_PORT, limits=limits) as server:
        assert server.grpc_address is not None
        with socket.create_connection((server.grpc_address.host, server.grpc_address.port), 60) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            head = connection.recv(9, socket.MSG_WAITALL)
            sent = connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
        found = dict(struct.iter_unpack(">HI", sent))  # of SETTINGS, the first frame: RFC 9113, 6.5.2
        assert (head[3], found[3], found[6]) == (4, 7, 20_000)
        with grpc.insecure_channel(str(server.grpc_address)) as channel:
            live = channel.unary_unary(f"/{SERVICE}/ServerLive")
            assert live(b"", timeout=60, metadata=[("a", "b" * 15_000)]) == b"\x08\x01"
            with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
                live(b"", timeout=60, metadata=[("a", "b" * 20_000)])


def asked_first(held: HeldCalls, server: ModelServer) -> Future[Any]:
    """Send a request by gRPC, and return when its computation has begun."""
    asked = held.later(raw_call, server, "ModelInfer", ONE_ROW)
    held.await_call()
    return asked


def test_a_client_that_leaves_ends_its_request(folder: Path) -> None:
    with served(folder / "scale", ServingSettings(max_batch=1), grpc=ANY_PORT) as server:
        held = HeldCalls(server)
        first = asked_first(held, server)
        with grpc.insecure_channel(str(server.grpc_address)) as channel:
            sent = ONE_ROW.SerializeToString()
            left = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(sent)
            until(lambda: len(server._service._arrived) == 2)
            left.cancel()
            until(lambda: server._service.in_progress == 1)
        held.release()
        first.result(60)
        raw_call(server, "ModelInfer", ONE_ROW)
        lines = call(server.url, "/metrics")[1].decode().splitlines()
    assert 'dflow_serve_batch_rows_sum{model="scale"} 2.0' in lines
    assert 'dflow_serve_requests_total{model="scale",status="CANCELLED"} 1.0' in lines


def test_a_stop_answers_what_was_taken_and_refuses_what_comes(folder: Path) -> None:
    with served(folder / "scale", grpc=ANY_PORT) as server:
        held = HeldCalls(server)
        first = asked_first(held, server)
        stopping = held.later(server.stop)
        ready = triton.service_pb2.ServerReadyRequest()
        until(lambda: not raw_call(server, "ServerReady", ready).ready)
        named = triton.service_pb2.ModelReadyRequest(name="scale")
        assert not raw_call(server, "ModelReady", named).ready
        assert raw_call(server, "ServerLive", triton.service_pb2.ServerLiveRequest()).live
        found = refusal(server, "ModelInfer", ONE_ROW)
        assert found == ("UNAVAILABLE", "the server is stopping")
        held.release()
        assert list(first.result(60).outputs[0].contents.fp32_contents) == [2, 4]
        assert stopping.result(60)
        assert refusal(server, "ServerLive", b"")[0] == "UNAVAILABLE"


def test_requests_that_come_in_the_moment_of_the_stop_are_unavailable(folder: Path) -> None:
    """The loop finds them when it has begun to stop: a client may send them again."""
    sent, begun = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        sent.wait(60)
        server._service.is_stopping = True
        stops.append(asyncio.ensure_future(server._grpc.stop(30)))

    stops: list[Any] = []
    with served(folder / "scale", grpc=ANY_PORT) as server, grpc.insecure_channel(str(server.grpc_address)) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        ask(ONE_ROW.SerializeToString(), timeout=60)  # connected
        server._loop.call_soon_threadsafe(block)
        assert begun.wait(60)
        asked = [ask.future(ONE_ROW.SerializeToString(), timeout=60) for _ in range(30)]
        sent.set()
        found = {(one.exception().code().name, one.exception().details()) for one in asked}
    assert found == {("UNAVAILABLE", "the server is stopping")}


def test_a_stop_ends_in_time_although_a_call_hangs(folder: Path) -> None:
    with served(folder / "scale", grpc=ANY_PORT) as server:
        held = HeldCalls(server)
        first = asked_first(held, server)
        assert not server.stop(grace_s=0.0)
        held.release()
        error = first.exception(60)
        assert isinstance(error, grpc.RpcError)
        assert (error.code(), error.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the server stopped before the computation ended",
        )


def test_a_fault_of_the_server_is_answered_and_logged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> Any:
        raise MemoryError("no more")

    with served(folder / "scale", grpc=ANY_PORT) as server:
        monkeypatch.setattr(server._service, "answer", fail)
        monkeypatch.setattr(server._service, "index", fail)
        answer = ("INTERNAL", "the server failed; its log has the reason")
        assert refusal(server, "ModelInfer", ONE_ROW) == answer
        assert refusal(server, "RepositoryIndex", b"") == answer
    logged = [record.getMessage() for record in caplog.records if record.name == "dflow"]
    assert logged == ["ModelInfer failed", "RepositoryIndex failed"]


def test_clients_that_leave_during_their_answers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("ExecuteBatchError raised in core by servicer method [ModelInfer]", "another error"):
        logging.getLogger("grpc._cython.cygrpc").error(text)
    assert [record.getMessage() for record in caplog.records] == ["another error"]


def test_a_port_in_use_is_an_error_and_an_address_may_need_certificates(folder: Path, server: ModelServer) -> None:
    assert server.grpc_address is not None
    with pytest.raises(OSError, match=rf"cannot listen at {server.grpc_address}: .*; give another --grpc, or port 0"):
        ModelServer(folder, ANY_PORT, ServingSettings(), SameMachine(), grpc=server.grpc_address)
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        twice = TcpAddress(*listener.getsockname())
    with pytest.raises(OSError, match=r"cannot listen: .* in use.*; give another --address or --grpc, or port 0"):
        ModelServer(folder / "scale", twice, ServingSettings(), SameMachine(), grpc=twice)
    with pytest.raises(SecurityError, match=r"address '0.0.0.0:0' is not a loopback address"):
        ModelServer(folder, ANY_PORT, ServingSettings(), SameMachine(), grpc=TcpAddress("0.0.0.0", 0))


def test_clients_show_a_certificate_by_the_authority(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    init_authority(tmp_path / "authority", days=2)
    for name in ("server:0", "client:0"):
        issue_to(tmp_path / "authority", [name], ["127.0.0.1"], days=1)
    policy = MutualTls.in_folder(tmp_path / "authority" / "server-0")
    own = tmp_path / "authority" / "client-0"
    authority, key, certificate = ((own / name).read_bytes() for name in ("ca.pem", "key.pem", "cert.pem"))
    with ModelServer(folder / "scale", ANY_PORT, ServingSettings(), policy, grpc=ANY_PORT, poll_s=0) as server:
        for shown in ((key, certificate), (None, None)):
            credentials = grpc.ssl_channel_credentials(authority, *shown)
            with grpc.secure_channel(str(server.grpc_address), credentials) as channel:
                live = channel.unary_unary(f"/{SERVICE}/ServerLive")
                if shown[0]:
                    assert live(b"", timeout=60) == b"\x08\x01"
                else:
                    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                        live(b"", timeout=60)
