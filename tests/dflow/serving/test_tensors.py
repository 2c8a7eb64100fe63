"""The codec of the Open Inference Protocol against NumPy, in JSON and in binary form."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.extra.numpy as drawn
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.serving import tensors
from dflow.serving.request_members import InferenceRequest, RefusedRequest
from dflow.serving.tensors import DATATYPES, decode_request, encode_response
from tests.dflow.serving.inference_client import binary_request, json_input, json_request, name_of
from tests.effort import examples

pytestmark = pytest.mark.once

EMPTY = InferenceRequest([])


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw an array of a dtype of the protocol, whose floating-point values are finite."""
    dtype = draw(st.sampled_from(list(DATATYPES.values())))
    shape = draw(drawn.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    base = np.dtype(np.float32) if dtype == ml_dtypes.bfloat16 else dtype
    array = draw(drawn.arrays(base, shape, elements=None if base.kind in "biu" else {"allow_nan": False}))
    if dtype == ml_dtypes.bfloat16:
        array = np.clip(array, -1e38, 1e38).astype(dtype)
    return np.where(np.isfinite(array), array, 0).astype(dtype) if base.kind == "f" else array


def equal(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@settings(max_examples=examples(100))
@given(arrays(), arrays())
def test_a_request_arrives_as_numpy_had_it(x: Any, y: Any) -> None:
    _, found = decode_request(json_request(x=x, y=y), None)
    assert equal(found["x"], x)
    assert equal(found["y"], y)
    body, headers = binary_request(x=x, y=y)
    _, found = decode_request(body, headers["Inference-Header-Content-Length"])
    assert equal(found["x"], x)
    assert equal(found["y"], y)


@settings(max_examples=examples(100))
@given(arrays(), arrays(), st.booleans())
def test_a_response_has_what_numpy_had(x: Any, y: Any, is_binary: bool) -> None:
    request = InferenceRequest([], parameters={"binary_data_output": is_binary})
    parts, size = encode_response({"id": "7"}, {"x": x, "y": y}, request)
    body = b"".join(parts)
    assert (size is not None) == is_binary
    response = json.loads(body[:size])
    assert response["id"] == "7"
    rest = body[size:] if size is not None else b""
    for one, array in zip(response["outputs"], (x, y), strict=True):
        assert (one["datatype"], one["shape"]) == (name_of(array.dtype), list(array.shape))
        dtype = array.dtype
        if is_binary:
            own, rest = rest[: one["parameters"]["binary_data_size"]], rest[one["parameters"]["binary_data_size"] :]
            assert own == array.tobytes()
        else:
            assert equal(np.array(one["data"], dtype).reshape(one["shape"]), array)
    assert rest == b""


def test_values_may_be_flat_or_nested_as_the_shape() -> None:
    nested = json_input("x", np.arange(6, dtype=np.int32).reshape(2, 3))
    for data in (nested["data"], list(range(6))):
        _, found = decode_request(json.dumps({"inputs": [{**nested, "data": data}]}).encode(), None)
        assert found["x"].tolist() == [[0, 1, 2], [3, 4, 5]]


X = {"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"datatype": "FLOAT"}, r"input 'x': expected a datatype of BOOL, .*FP64, BYTES, got 'FLOAT'"),
        ({"shape": [-1]}, r"input 'x': expected a shape of sizes from 0, got \[-1\]"),
        ({"shape": [2**70, 0], "data": []}, r"input 'x': expected a shape of at most \d+ bytes, got \[\d+, 0\]"),
        ({"shape": [2**40, 2**40, 0], "data": []}, "input 'x': expected a shape of at most"),
        ({"shape": [2**61, 0], "data": []}, "input 'x': expected a shape of at most"),
        ({"shape": [3]}, r"input 'x': expected 3 values for its shape \[3\], got 2 values"),
        ({"shape": [1, 2], "data": [[1], [2]]}, r"input 'x': expected 2 values .*got a list of shape \[2, 1\]"),
        (
            {"shape": [2, 2], "data": [[1, 2], [3]]},
            r"input 'x': expected FP32 of shape \[2, 2\], got lists of several lengths$",
        ),
        ({"data": [1, "a"]}, r"input 'x': expected FP32 of shape \[2\], got a string at data\[1\]$"),
        ({"data": [1, None]}, r"input 'x': expected FP32 .*, got null at data\[1\]$"),
        ({"data": [1, 1e39]}, "input 'x': expected numbers that FP32 can hold, got a larger one"),
        ({"datatype": "FP16", "data": [1, 70000]}, "input 'x': expected numbers that FP16 can hold"),
        ({"datatype": "INT8", "data": [1, 128]}, r"input 'x': expected INT8 of shape \[2\], got 128$"),
        ({"datatype": "INT32", "data": [1, 1.5]}, r"input 'x': expected INT32 .*, got a float at data\[1\]$"),
        ({"datatype": "BOOL", "data": [True, 1]}, r"input 'x': expected BOOL .*, got a number at data\[1\]$"),
        (
            {"parameters": {"binary_data_size": 8}},
            "input 'x': expected data or the parameter binary_data_size, got both",
        ),
        ({"data": ...}, "input 'x': expected data or the parameter binary_data_size, got neither"),
        (
            {"data": ..., "parameters": {"binary_data_size": 8}},
            r"input 'x': expected 8 bytes of binary data for FP32\[2\], got binary_data_size 8 and 0 bytes",
        ),
        (
            {"parameters": {"shared_memory_region": "r"}},
            "input 'x': unknown parameter 'shared_memory_region'; shared memory is not offered; leave it out",
        ),
        ({"parameters": {"binary_data_sise": 8}}, "'binary_data_sise'; did you mean binary_data_size?"),
        ({"shpe": [2]}, "input 'x': unknown member 'shpe'; did you mean shape?"),
        ({"zzz": 1}, "input 'x': unknown member 'zzz'; the members are name, shape, datatype, parameters, data"),
        ({"contents": {}}, "input 'x': unknown member 'contents'; gRPC's form of tensors is not offered"),
        ({"data": [1, float("nan")]}, "input 'x': NaN or infinity, which JSON cannot hold; send it as bytes"),
        ({"data": [-float("inf"), 1]}, "input 'x': NaN or infinity"),
        ({"data": [1, 10**400]}, "input 'x': expected FP32 of shape .*, got a number beyond its range$"),
        (
            {"datatype": "INT64", "data": [1, 2**63]},
            "input 'x': expected INT64 of shape .*, got a number beyond its range$",
        ),
        ({"datatype": "UINT64", "data": [1, -1]}, r"input 'x': expected UINT64 of shape .*, got -1$"),
    ],
)
def test_a_bad_input_is_refused_by_its_name(changes: dict[str, Any], text: str) -> None:
    tensor = {key: value for key, value in (X | changes).items() if value is not ...}
    with pytest.raises(RefusedRequest, match=text) as refused:
        decode_request(json.dumps({"inputs": [tensor]}).encode(), None)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "size", "text"),
    [
        (b"{", None, "the request's JSON: expected an object, got none, or not the whole"),
        (b"\xff", None, "the request's JSON"),
        (b"{}", None, "the request's JSON: expected the member 'inputs', got none"),
        (b'{"inputs":[]}abc', "13", "binary data: 3 bytes belong to no input"),
        (b'{"inputs":[]}', "14", "Inference-Header-Content-Length: expected a number up to 13"),
        (b'{"inputs":[]}', "-1", "Inference-Header-Content-Length: expected a number"),
        (json.dumps({"inputs": [X, X]}).encode(), None, "input 'x': expected once, got twice"),
        *(
            (json.dumps({"inputs": [X]} | members).encode(), None, text)
            for members, text in (
                ({"sequence_id": 3}, "the request: unknown member 'sequence_id'; sequences are not offered"),
                ({"parameters": {"sequence_id": 3}}, "the request: unknown parameter 'sequence_id'; sequences are not"),
                ({"parameters": {"priority": 1}}, "unknown parameter 'priority'; priorities are not offered"),
                ({"parameters": {"timout": 1}}, "the request: unknown parameter 'timout'; did you mean timeout?"),
                ({"parameters": {"timeout": True}}, "'timeout': expected a whole number of microseconds, got True"),
                (
                    {"parameters": {"binary_data_output": "no"}},
                    "'binary_data_output': expected true or false, got 'no'",
                ),
                ({"output": []}, "the request: unknown member 'output'; did you mean outputs?"),
                ({"instances": []}, "unknown member 'instances'; the members are inputs, id, outputs, parameters"),
                ({"outputs": [{"nmae": "y"}]}, r"outputs\[0\]: unknown member 'nmae'; did you mean name"),
                (
                    {"outputs": [{"name": "y", "data": 1}]},
                    "output 'y': unknown member 'data'; the members are name, par",
                ),
                (
                    {"outputs": [{"name": "y", "parameters": {"binary": True}}]},
                    "output 'y': unknown parameter 'binary'; did you mean binary_data?",
                ),
                (
                    {"outputs": [{"name": "y", "parameters": {"binary_data": 1}}]},
                    "output 'y': parameter 'binary_data': expected true or false, got 1",
                ),
                (
                    {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
                    "'classification': expected 0, got 3; the classification extension is not offered",
                ),
            )
        ),
    ],
)
def test_a_bad_request_is_refused(body: bytes, size: str | None, text: str) -> None:
    with pytest.raises(RefusedRequest, match=text):
        decode_request(body, size)


@pytest.mark.parametrize("shape", [(11,), (5, 2), (4, 3, 2), (3, 0), (0,)])
@pytest.mark.parametrize("indent", [None, 1])
def test_long_lists_are_decoded_and_encoded_in_pieces(
    shape: tuple[int, ...], indent: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_PIECE_BYTES", 3)
    monkeypatch.setattr(tensors, "_PIECE_NUMBERS", 2)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    for data in (array.tolist(), array.reshape(-1).tolist()):
        body = json.dumps({"inputs": [json_input("x", array) | {"data": data}]}, indent=indent).encode()
        assert equal(decode_request(body, None)[1]["x"], array)
    (encoded,), _ = encode_response({}, {"x": array}, EMPTY)
    assert json.loads(encoded)["outputs"][0]["data"] == array.reshape(-1).tolist()


@pytest.mark.parametrize(
    "data", [b"[1,2,3,,4]", b"[1,2,3,4,]", b"[,1,2,3,4]", b"[[1,2],[3],[4]]", b"[1,2]],[[3,4]", b'[1,2,"],",4]']
)
def test_a_bad_list_in_pieces_is_refused(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"inputs": [X | {"shape": [2, 2], "data": 0}]}).encode().replace(b'"data": 0', b'"data":' + data)
    for size in (1, 2, 3, 4):
        monkeypatch.setattr(tensors, "_PIECE_BYTES", size)
        with pytest.raises(RefusedRequest, match=r"the request's JSON|expected FP32 of shape"):
            decode_request(body, None)


def test_a_wrong_value_of_a_list_in_pieces_has_no_place_of_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps({"inputs": [X | {"shape": [4], "data": [1, 2, 3, "a"]}]}).encode()
    monkeypatch.setattr(tensors, "_PIECE_BYTES", 4)
    with pytest.raises(RefusedRequest, match=r"expected FP32 of shape \[4\], got a string$"):
        decode_request(body, None)


def test_a_large_shape_without_elements_is_taken() -> None:
    request = {"inputs": [X | {"shape": [2**60, 0], "data": []}]}
    assert decode_request(json.dumps(request).encode(), None)[1]["x"].shape == (2**60, 0)


def test_a_byte_that_is_no_truth_value_is_refused() -> None:
    body, headers = binary_request(x=np.array([True, False]))
    with pytest.raises(RefusedRequest, match="expected the bytes 0 and 1 for BOOL"):
        decode_request(body[:-1] + b"\x02", headers["Inference-Header-Content-Length"])


def test_a_response_refuses_what_json_cannot_hold() -> None:
    outputs = {"y": np.array([1.0, np.nan], np.float32)}
    with pytest.raises(
        RefusedRequest, match=r"output 'y': NaN or infinity, which JSON cannot hold; request .*binary_data"
    ):
        encode_response({}, outputs, EMPTY)
    one = json.dumps({"inputs": [], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    assert encode_response({}, outputs, decode_request(one, None)[0])[1] is not None
