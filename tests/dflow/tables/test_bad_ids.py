"""Ids that no table may expect, at each door: a call, and requests over HTTP and gRPC. Each is answered, or named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.transport.addresses import TcpAddress
from tests.dflow.serving.inference_client import infer, json_input
from tests.dflow.serving.small_exports import served

pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")]

TABLE = dflow.Embedding(9, 2, vocabulary=dflow.Vocabulary(), name="people")


def lookup(user: Any) -> Any:
    return TABLE(user)


def bag(user: Any, weights: Any) -> Any:
    return TABLE.bag(user, weights=weights)


LOOKUP = dflow.jit(lookup)
#: Ids that are answered.
RIGHT = {
    "unknown": ["nobody", "no one"],
    "empty string": [""],
    "10 MB": ["x" * 10_000_000],
    "not Unicode": [b"\xff\x00"],
    "no rows": [],
    "100,000 rows": [f"user-{number}" for number in range(100_000)],
}
#: Ids that are refused, with the error of a call.
WRONG: dict[str, tuple[Any, str]] = {
    "None": (["a", None], r"argument 'user': expected .*, got None at \(0, 1\)"),
    "nan": (np.array(["a", np.nan], object), r"argument 'user': .*got nan at \(1,\)"),
    "mixed": (["a", 5], r"argument 'user': expected only strings, got 5 \(int\)"),
    "ragged": ([["a"], ["b", "c"]], "argument 'user': expected rows of one length"),
    "ragged numbers": ([[1], [2, 3]], "ids of table 'people': expected rows of one length"),
    "half a character": (["\ud800"], "argument 'user': expected strings of Unicode"),
    "beyond 64 bits": (np.array([2**70, 1], object), "argument 'user': expected integers of at most 64 bits"),
    "floats": ([1.5], r"ids of table 'people': expected integers, got user\[0\] of float32"),
    "floats and nan": (np.array([1, np.nan]), "ids of table 'people': expected integers, got user of float32"),
    "bools": ([1, True], r"ids of table 'people': expected integers, got user\[1\] of bool"),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_call_looks_up_any_strings(kind: str) -> None:
    ids = RIGHT[kind]
    np.testing.assert_array_equal(LOOKUP(ids), TABLE(dflow.wide_ids(ids)))


@pytest.mark.parametrize("kind", WRONG)
def test_a_call_names_wrong_ids(kind: str) -> None:
    ids, message = WRONG[kind]
    with pytest.raises(dflow.InputError, match=message):
        LOOKUP(ids)


def test_numbers_of_a_list_are_ids() -> None:
    np.testing.assert_array_equal(LOOKUP([[1, 2], [3, 1]]), TABLE(np.array([[1, 2], [3, 1]])))


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize(("ids", "pandas", "polars"), [(["a", "b"], "string", "String"), ([1, 2**40], *["Int64"] * 2)])
def test_a_column_with_a_missing_id_is_named(library: str, ids: list[Any], pandas: str, polars: str) -> None:
    frames = pytest.importorskip(library)
    dtype = pandas if library == "pandas" else getattr(frames, polars)
    np.testing.assert_array_equal(LOOKUP(frames.Series(ids, dtype=dtype)), TABLE(dflow.wide_ids(ids)))
    with pytest.raises(dflow.InputError, match=r"argument 'user': .*(<NA>|None|missing).* at \(1,\)"):
        LOOKUP(frames.Series([ids[0], None], dtype=dtype))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of `lookup` and `bag`, and Triton's client of its gRPC."""
    triton = pytest.importorskip("tritonclient.grpc")
    folder = tmp_path_factory.mktemp("names") / "m"
    names, weights = dflow.spec("b, 2", np.str_), dflow.spec("b, 2", jnp.float32)
    dflow.export({"lookup": (lookup, dflow.spec("b", np.str_)), "bag": (bag, names, weights)}).save(folder)
    with (
        served(folder, grpc=TcpAddress("127.0.0.1", 0)) as server,
        closing(triton.InferenceServerClient(str(server.grpc_address))) as client,
    ):
        yield SimpleNamespace(url=server.url, triton=triton, client=client)


def by_http(server: Any, function: str, *inputs: dict[str, Any]) -> tuple[int, Any]:
    """Return the status, and the result or the error."""
    status, body, _ = infer(server.url, f"m.{function}", json.dumps({"inputs": inputs}).encode())
    return status, body["outputs"][0]["data"] if status == 200 else body["error"]


def by_grpc(server: Any, function: str, **arrays: Any) -> Any:
    inputs = []
    for name, array in arrays.items():
        kind = {"O": "BYTES", "f": "FP32", "b": "BOOL"}[array.dtype.kind]
        inputs.append(server.triton.InferInput(name, array.shape, kind).set_data_from_numpy(array))
    return server.client.infer(f"m.{function}", inputs).as_numpy("result")


def of_names(ids: list[Any]) -> dict[str, Any]:
    return {"name": "user", "datatype": "BYTES", "shape": [len(ids)], "data": ids}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_server_looks_up_any_strings(kind: str, server: Any) -> None:
    ids = RIGHT[kind]
    expected = TABLE(dflow.wide_ids(ids))
    np.testing.assert_allclose(by_grpc(server, "lookup", user=np.array(ids, object)), expected, atol=1e-6)
    if kind != "not Unicode":  # which JSON has not
        status, found = by_http(server, "lookup", of_names(ids))
        assert status == 200, found
        np.testing.assert_allclose(np.reshape(found, expected.shape), expected, atol=1e-6)


@pytest.mark.parametrize("wrong", [1.5, True, None, 5, ["a"]], ids=str)
def test_a_server_names_the_input_with_wrong_ids_and_goes_on(wrong: Any, server: Any) -> None:
    status, error = by_http(server, "lookup", of_names(["a", wrong]))
    assert status == 400
    assert re.fullmatch(r"input 'user': expected BYTES of shape \[2\], got .* at data\[1\]", error)
    if isinstance(wrong, float):
        with pytest.raises(server.triton.InferenceServerException, match=r"input 'user': expected BYTES\[b\], got"):
            by_grpc(server, "lookup", user=np.array([wrong], np.float32))
    assert by_http(server, "lookup", of_names(["a"]))[0] == 200


def test_a_weight_of_nan_is_in_its_bag_alone(server: Any) -> None:
    names, weights = np.array([["a", "b"], ["a", "c"]], object), np.array([[1, np.nan], [1, 2]], np.float32)
    for found in (dflow.jit(bag)(names, weights), by_grpc(server, "bag", user=names, weights=weights)):
        assert np.isnan(found[0]).all()
        np.testing.assert_allclose(found[1], TABLE(["a"])[0] + 2 * TABLE(["c"])[0], atol=1e-6)
    ids = {"name": "user", "datatype": "BYTES", "shape": [2, 2], "data": names.tolist()}
    status, error = by_http(server, "bag", ids, json_input("weights", weights))
    assert (status, error.partition(":")[0]) == (400, "input 'weights'")
