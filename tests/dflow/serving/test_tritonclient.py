"""The HTTP client of NVIDIA's Triton against `dflow serve`'s server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import dflow
from dflow.serving.served_version import ServingSettings
from tests.dflow.serving.small_exports import served

pytestmark = pytest.mark.once
triton = pytest.importorskip("tritonclient.http")

DTYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32")
NAMES = {"bool": "BOOL", "bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    same = {name: jax.ShapeDtypeStruct(dflow.spec("b, 3", jnp.float32).shape, jnp.dtype(name)) for name in DTYPES}
    dflow.export(lambda arrays: arrays, same).save(place / "same")
    return place


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    with served(folder, ServingSettings(max_batch=4)) as server:
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        yield client
        client.close()


@pytest.mark.parametrize("is_binary", [True, False])
def test_every_dtype_goes_there_and_back(client: Any, is_binary: bool) -> None:
    random = np.random.default_rng(0)
    inputs, expected = [], {}
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        array = random.integers(0, 2 if name == "bool" else 100, (2, 3)).astype(dtype)
        # Triton's client sends 16-bit floats as bytes alone.
        in_binary = is_binary or name in ("float16", "bfloat16")
        one = triton.InferInput(f"arrays[{name!r}]", [2, 3], NAMES.get(name, name.upper()))
        one.set_data_from_numpy(array, binary_data=in_binary)
        inputs.append(one)
        expected[name] = array
    outputs = [
        triton.InferRequestedOutput(name, binary_data=is_binary or name in ("float16", "bfloat16")) for name in DTYPES
    ]
    result = client.infer("same", inputs, outputs=outputs, request_id="r1")
    assert result.get_response()["id"] == "r1"
    for name, array in expected.items():
        found = result.as_numpy(name)
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
