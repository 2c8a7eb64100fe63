"""Ids as they are in exports: strings and integers of 64 bits, in loaded functions and over JSON, bytes and gRPC."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.transport.addresses import TcpAddress
from dflow.serving.served_version import ServingSettings
from dflow.tracing.errors import SignatureError
from tests.dflow.serving.inference_client import call, infer
from tests.dflow.serving.small_exports import served

pytestmark = pytest.mark.once

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
        (tensor("user", "BYTES", ["a", 5, "b"]), "input 'user': expected BYTES of shape [3], got a number at data[1]"),
        (tensor("user", "INT64", [1, 2, 3]), "input 'user': expected BYTES[b], got INT64[3]"),
        (tensor("user", "BYTES", ["a", "b"]), "input 'item': expected 2 for b, as 'user' has, got 3"),
        ({**tensor("user", "BYTES", ["a", "b"]), "shape": [3]}, "input 'user': expected 3 values for its shape [3]"),
    ],
)
def test_a_wrong_string_names_the_input(server: Any, user: Any, message: str) -> None:
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
