"""Safetensors files: dflow restores files of the format's own library, and that reads files of dflow."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.files.safetensors_file import read_safetensors, write_safetensors
from tests.effort import examples

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32"]
ALL_DTYPES = [*map(np.dtype, [*DTYPES, "float64", "complex64"]), np.dtype(ml_dtypes.bfloat16)]

arrays = st.dictionaries(
    st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__"),
    st.builds(
        lambda dtype, shape: np.arange(int(np.prod(shape))).reshape(shape).astype(dtype),
        st.sampled_from(ALL_DTYPES),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=4,
)


@settings(max_examples=examples(60))
@given(arrays=arrays)
def test_files_are_those_of_the_library(
    arrays: dict[str, np.ndarray[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    write_safetensors(folder / "ours", arrays, {"a": [1]})
    safetensors.numpy.save_file(arrays, folder / "theirs", {"format": "np"})
    theirs = safetensors.numpy.load_file(folder / "ours")
    assert theirs.keys() == arrays.keys()
    for name in ("ours", "theirs"):
        files = read_safetensors(folder / name)
        assert files.metadata == ({"a": [1]} if name == "ours" else {})
        ours = dict(files.each(dict.fromkeys(arrays)))
        for key, value in arrays.items():
            for other in (ours[key], theirs[key]):
                assert (other.dtype, other.shape, other.tobytes()) == (value.dtype, value.shape, value.tobytes())


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_malformed_file_is_refused_and_changes_nothing(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files") / "a.safetensors"
    entry = {
        "dtype": data.draw(st.sampled_from(["F32", "F64", "F31", "", 3])),
        "shape": data.draw(st.lists(st.integers(-2, 2**70), max_size=3)),
        "data_offsets": data.draw(st.lists(st.integers(-9, 2**70), max_size=3)),
    }
    header = json.dumps({"w": data.draw(st.sampled_from([entry, [], None]))}).encode()
    length = data.draw(st.sampled_from([len(header), 0, 1, 2**40, 2**63, len(header) - 1, len(header) + 99]))
    path.write_bytes(length.to_bytes(8, "little") + header[: data.draw(st.integers(0, len(header)))])
    w = dflow.Variable(jnp.ones(3), name="w")
    with pytest.raises(dflow.CheckpointError):
        dflow.restore(path, w)
    assert w.read().tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("b", "rest"), [([4, 8], b""), ([12, 16], b"1234"), ([8, 12], b"1")], ids=["overlap", "gap", "more"]
)
def test_arrays_that_do_not_fill_the_file_are_refused(tmp_path: Path, b: list[int], rest: bytes) -> None:
    """A changed number of the header would shift the values unnoticed."""
    path, state = tmp_path / "c.safetensors", dflow.variables({"a": jnp.ones(2), "b": jnp.ones(1)})
    dflow.save(path, state)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["b"]["data_offsets"] = b
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :] + rest)
    with pytest.raises(dflow.DamagedCheckpoint, match=r"c.safetensors: expected a safetensors file.* header"):
        dflow.restore(path, state)


@settings(max_examples=examples(100), deadline=None)
@given(where=st.integers(0, 2**20), other=st.integers(1, 255))
def test_a_changed_byte_changes_no_more_than_the_value_that_it_is_in(
    where: int, other: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flipped") / "c.safetensors"
    state = dflow.variables({"a": jnp.arange(3.0), "b": jnp.arange(4), "c": jnp.ones((2, 2), jnp.bfloat16)})
    dflow.save(path, state)
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= other
    path.write_bytes(content)
    before = [np.asarray(value).tobytes() for value in dflow.read(state).values()]
    with contextlib.suppress(dflow.CheckpointError):
        dflow.restore(path, state)
    after = [np.asarray(value).tobytes() for value in dflow.read(state).values()]
    pairs = zip(b"".join(before), b"".join(after), strict=True)
    assert sum(one != two for one, two in pairs) <= 1


def test_a_file_of_another_program_is_restored_by_its_names(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"model.w": np.full((2, 3), 5, "f4"), "model.x": np.ones(1, "f4")}, path)
    model = {"w": dflow.Variable(jnp.zeros((2, 3)), name="w"), "b": dflow.Variable(jnp.zeros(3), name="b")}
    with pytest.raises(dflow.CheckpointError, match=r"(?s)differ.*missing.*model.b.*unexpected.*model.x"):
        dflow.restore(path, model, names=lambda name: f"model.{name}")
    report = dflow.restore(path, model, names=lambda name: f"model.{name}", strict=False)
    assert (report.restored, float(model["w"].sum())) == (("model.w",), 30.0)


@pytest.mark.parametrize("value", [jnp.ones(3, "int4"), jax.random.key(1)], ids=["int4", "key"])
def test_a_dtype_that_the_format_has_not_is_refused(tmp_path: Path, value: jax.Array) -> None:
    with pytest.raises(dflow.CheckpointError, match=r"array 'v': expected one of the dtypes .*\n  at .*\n  save it to"):
        dflow.save(tmp_path / "v.safetensors", dflow.Variable(value, name="v"))
    assert os.listdir(tmp_path) == []


def test_a_missing_file_and_a_cut_off_one_are_named(tmp_path: Path) -> None:
    path, w = tmp_path / "w.safetensors", dflow.Variable(jnp.ones(3), name="w")
    with pytest.raises(dflow.NoCheckpoint, match=r"w.safetensors: expected a safetensors file, got none"):
        dflow.restore(path, w)
    dflow.save(path, w)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(dflow.DamagedCheckpoint, match=r"expected a safetensors file.* not fully covered"):
        dflow.restore(path, w)
