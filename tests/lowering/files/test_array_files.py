"""Folders of arrays: reading gives the written values, damage is found, and a folder is complete or absent."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.files import array_files, array_manifest, atomic_directory
from dflow.lowering.files.array_files import MANIFEST, make_paths, read_arrays, write_manifest, write_parts
from dflow.lowering.files.whole_arrays import own_copy
from dflow.tracing.errors import CheckpointError, CheckpointExists, NoCheckpoint
from tests.effort import examples
from tests.lowering.files.written_arrays import write_arrays

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3, ml_dtypes.float8_e8m0fnu),
    *(ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn),
]


def _read(path: Path) -> dict[str, np.ndarray]:
    files = read_arrays(path)
    return files.read(dict.fromkeys(files.types))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_an_array_of_any_type_is_read_back_bit_for_bit(tmp_path: Path, dtype: Any) -> None:
    shapes: list[tuple[int, ...]] = [(), (5,), (0,), (3, 0, 2), (2, 3, 4)]
    values = {f"{shape}": np.random.default_rng(0).integers(0, 2, shape).astype(dtype) for shape in shapes}
    write_arrays(tmp_path / "c", values)
    files = read_arrays(tmp_path / "c")
    for name, read in files.read(dict.fromkeys(values)).items():
        assert str(files.types[name]) == str(files.types[name].strong)
        assert (read.dtype, read.shape, read.tobytes()) == (dtype, values[name].shape, values[name].tobytes())


@pytest.mark.parametrize("placed", [False, True])
def test_a_copy_shares_no_memory_however_that_is_aligned(placed: bool) -> None:
    raw = np.zeros(4096 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    aligned = raw[start : start + 4096].view(np.float32)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0]) if placed else None
    copy = own_copy(aligned, sharding).block_until_ready()
    aligned[:] = 1
    assert not np.asarray(copy).any()


def test_large_arrays_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(array_files, "_IN_FLIGHT_BYTES", 200)
    values = np.arange(6 * 9 * 7, dtype=np.float32).reshape(6, 9, 7)
    prime = np.arange(13 * 4, dtype=np.float32).reshape(13, 4)
    write_arrays(tmp_path / "c", {"x": values, "y": values[0], "prime": prime})
    written = zarr.open(tmp_path / "c", mode="r")
    assert (written["x"].chunks, written["prime"].chunks) == ((1, 2, 7), (4, 4))
    for name, array in {"x": values, "y": values[0], "prime": prime}.items():
        np.testing.assert_array_equal(_read(tmp_path / "c")[name], array)


_PARTS = ["a", "A", "b", "c", "0", "zarr.json", "..", ".", "", "dflow.json", "_METADATA", "w.", "x" * 300]
_NAMES = st.text(max_size=8) | st.lists(st.sampled_from(_PARTS), max_size=4).map("/".join)


@settings(max_examples=examples(40), deadline=None)
@given(names=st.sets(_NAMES, max_size=8))
def test_arrays_of_any_names_stay_apart(tmp_path_factory: pytest.TempPathFactory, names: set[str]) -> None:
    path = tmp_path_factory.mktemp("names") / "c"
    arrays = {name: np.array([number], np.int32) for number, name in enumerate(sorted(names))}
    write_arrays(path, arrays)
    assert {name: int(array[0]) for name, array in _read(path).items()} == {n: int(a[0]) for n, a in arrays.items()}
    assert os.listdir(path.parent) == ["c"]


def test_parts_that_are_written_side_by_side_are_one_checkpoint(tmp_path: Path) -> None:
    parts = {"a/x": np.arange(3)}, {"a/y": jnp.ones(2000), "b": jnp.zeros((2, 0))}, {"B": np.float32(2)}
    paths = make_paths(tmp_path, [name for part in parts for name in part])
    with ThreadPoolExecutor(3) as pool:
        written = list(pool.map(lambda part: write_parts(tmp_path, part, paths), parts))
    write_manifest(tmp_path, {name: type for types in written for name, type in types.items()}, paths, {})
    read = read_arrays(tmp_path).read(dict.fromkeys(paths))
    for name, value in ((name, value) for part in parts for name, value in part.items()):
        np.testing.assert_array_equal(read[name], value)


@pytest.mark.parametrize(
    ("value", "says"), [(np.array(["a"]), "dtype <U1"), (np.array([object()]), "dtype object")], ids=["text", "objects"]
)
def test_an_array_without_numbers_is_refused_by_name(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=f"array 'x' is of {says}, which cannot be written"):
        write_arrays(tmp_path / "c", {"y": 1.0, "x": value})
    assert os.listdir(tmp_path) == []


def _damages(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damage") / "c"
    arrays = {"a/x": np.arange(6, dtype=np.float32), "y": np.zeros((2, 2), np.int8), "z": np.int32(5)}
    write_arrays(path, arrays, {"step": 1})
    file = data.draw(st.sampled_from(_damages(path)))
    content = bytearray(file.read_bytes())
    how = data.draw(st.sampled_from(["flip", "cut", "remove"]))
    # A position independent of the file's length, since the length of the manifest varies with its checksum.
    place = data.draw(st.integers(0, 10**6)) % len(content)
    if how == "flip":
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[:place])
    else:
        file.unlink()
    inside = next((name for name in arrays if (path / name) in file.parents), None)
    refused, read = _attempt(path)
    if refused:
        assert f"array {inside!r}" in refused if inside else file.name == MANIFEST
    else:
        assert not inside or file.name == "zarr.json"
        for name, array in arrays.items():
            assert (read[name].dtype, read[name].tobytes()) == (array.dtype, array.tobytes())


def _attempt(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    try:
        return "", _read(path)
    except CheckpointError as error:
        return str(error), {}


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_manifest, "VERSION", 7)
    write_arrays(tmp_path / "c", {})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has version 7 of the format, and this dflow reads up to 1"):
        read_arrays(tmp_path / "c")


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointExists, match=r"holds no dflow\.json, so it is not what may be overwritten"):
        write_arrays(tmp_path / "precious", {"x": 1}, overwrite=True)
    assert (tmp_path / "precious" / "thesis.tex").read_text() == "x"


class _Crash(BaseException):
    pass


class _Machine:
    """Crash at one call that changes the disk, and make no later call, like a machine that loses power."""

    CALLS = (
        (os, "mkdir"),
        (os, "rename"),
        (array_files, "_write"),
        (os, "fsync"),
        (shutil, "rmtree"),
        (array_files, "_create"),
        (array_files, "_started"),
        (atomic_directory, "_exchange"),
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
        self.count, self.end = 0, end
        for module, name in self.CALLS:
            monkeypatch.setattr(module, name, self._ending(getattr(module, name)))

    def _ending(self, call: Any) -> Any:
        def ending(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count >= self.end:
                raise _Crash
            return call(*args, **kwargs)

        return ending


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("old", [None, 1], ids=["new", "overwritten"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, old: int | None, exchange: bool) -> None:
    new = {"a/x": np.full(5, 2), "b": np.full((), 2)}
    seen, end = set(), 0
    while True:
        end += 1
        folder = tmp_path / str(end)
        if old is not None:
            write_arrays(folder / "c", {"a/x": np.full(5, 1), "b": np.full((), 1)})
        with pytest.MonkeyPatch.context() as patch:
            if not exchange:
                patch.setattr(atomic_directory, "_exchange", lambda *_: False)
            machine = _Machine(patch, end)
            try:
                write_arrays(folder / "c", new, overwrite=old is not None)
            except _Crash:
                ended = True
            else:
                ended = False
        try:
            read = {int(value) for array in _read(folder / "c").values() for value in np.ravel(array)}
        except NoCheckpoint:
            read = {None}
        assert len(read) == 1
        assert read <= {old, 2}
        seen |= read
        # More attempts succeed whatever the crash left, and remove it. The first may not remove all, since writes that
        # this process had begun when it "crashed" may end only then.
        for number in range(3, 50):
            write_arrays(folder / "c", {"b": np.full((), number)}, overwrite=True)
            assert int(_read(folder / "c")["b"]) == number
            if os.listdir(folder) == ["c"]:
                break
        assert os.listdir(folder) == ["c"]
        if not ended:
            assert end > machine.count > 15
            break
    assert seen == {old, 2}


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    write_arrays(tmp_path / "c", {"x": np.full(5000, 1)})
    monkeypatch.setattr(tensorstore, "open", full)
    with pytest.raises(CheckpointError, match=r"array 'x' cannot be written .*No space left"):
        write_arrays(tmp_path / "c", {"x": np.full(5000, 2)}, overwrite=True)
    monkeypatch.undo()
    assert set(_read(tmp_path / "c")["x"]) == {1}
    assert os.listdir(tmp_path) == ["c"]


def test_a_reader_knows_that_the_folder_was_replaced(tmp_path: Path) -> None:
    write_arrays(tmp_path / "c", {"x": 1})
    files = read_arrays(tmp_path / "c")
    assert not files.is_replaced()
    write_arrays(tmp_path / "c", {"x": 2}, overwrite=True)
    assert files.is_replaced()
