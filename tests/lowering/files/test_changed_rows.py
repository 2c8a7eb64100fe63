"""Folders with the changed rows of large arrays: what is read is what was written, in its bits, and what is written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.files import array_files, changed_rows
from dflow.lowering.files.array_manifest import MANIFEST, manifest_text, read_manifest
from dflow.lowering.files.atomic_directory import whole_folder
from dflow.lowering.files.changed_rows import ChangedArrays, WrittenBytes, fill_with_changes, read_changed_arrays
from dflow.tracing.errors import DamagedCheckpoint
from tests.effort import examples

#: The shape of the table of most tests, and the bytes of one of its rows with its index.
SHAPE, ROW_BYTES = (64, 16), 16 * 4 + 8
DTYPES = [*map(np.dtype, ("float32", "float64", "int8", "int64", "bool", "complex64", "uint16"))]
DTYPES += [np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu)]
SHAPES = [(48,), (40, 3), (33, 2, 4), (7, 64), (2, 200)]
#: Sizes with which small arrays are written as large ones are: in several chunks, compared in several pieces.
SMALL = ((changed_rows, "LEAST_BYTES", 32), (changed_rows, "_PIECE_BYTES", 100), (array_files, "_CHUNK_BYTES", 1000))
REAL = [(module, name, getattr(module, name)) for module, name, _ in SMALL]


@pytest.fixture(autouse=True, scope="module")
def small_sizes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in SMALL:
            patch.setattr(module, name, size)
        yield


def write(folder: Path, arrays: Mapping[str, Any], older: ChangedArrays | None) -> tuple[WrittenBytes, ChangedArrays]:
    with whole_folder(folder, marker=MANIFEST) as part:
        written = fill_with_changes(part, arrays, older, {"step": 3})
    return written, read_changed_arrays(folder)


def table(shape: tuple[int, ...] = SHAPE) -> npt.NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def changed(value: npt.NDArray[Any], *rows: int) -> npt.NDArray[Any]:
    """Return a copy with other values in these rows."""
    value = value.copy()
    value[list(rows)] += 1
    return value


def new_bytes(folder: Path) -> int:
    """Return the bytes of the files that no other folder has."""
    files = [file.stat() for file in folder.rglob("*") if file.is_file()]
    return sum(about.st_size for about in files if about.st_nlink == 1)


def assert_same(arrays: ChangedArrays, expected: Mapping[str, Any]) -> None:
    assert {name: (type.dtype, type.shape) for name, type in arrays.types.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for sharding in (None, place):
        found = dict(arrays.each(dict.fromkeys(expected, sharding)))
        for name, value in expected.items():
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name


@st.composite
def bits(draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Draw values of any bits: zeros of both signs, NaNs of any payload."""
    count = int(np.prod(shape)) * dtype.itemsize
    special = [bytes(dtype.itemsize), bytes([*[0] * (dtype.itemsize - 1), 0x80])]
    data = draw(st.binary(min_size=count, max_size=count) | st.sampled_from(special).map(lambda one: one * count))
    found = np.frombuffer(data[:count], np.uint8)
    return (found % 2 if dtype == np.bool_ else found).view(dtype).reshape(shape).copy()


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), shape=st.sampled_from(SHAPES))
def test_whatever_rows_change_each_folder_is_read_in_its_bits(
    data: st.DataObject, dtype: np.dtype[Any], shape: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, older, is_kept = tmp_path_factory.mktemp("parts"), None, True
    value = data.draw(bits(dtype, shape))
    with jax.enable_x64(True):
        for number in range(data.draw(st.integers(2, 5))):
            indices = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=4, unique=True))
            value[indices] = data.draw(bits(dtype, (len(indices), *shape[1:])))
            if data.draw(st.integers(0, 9)) == 0:
                value = data.draw(bits(dtype, shape))
            arrays = {"table": jnp.array(value), "small": jnp.float32(number)}
            expected = {"table": value.copy(), "small": np.float32(number)}
            written, new = write(folder / str(number), arrays, older)
            assert written.full_bytes == value.nbytes + 4
            assert written.written_bytes <= written.full_bytes
            if older is not None and not (is_kept := data.draw(st.booleans())):
                shutil.rmtree(older.path)  # no folder needs another one
            assert_same(new, expected)
            assert new.metadata["step"] == 3
            older = new if older is None or not is_kept or data.draw(st.booleans()) else older


@pytest.mark.once
def test_few_bytes_are_written_for_a_large_table_of_which_few_rows_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, size in REAL:
        monkeypatch.setattr(module, name, size)
    value = table((20_000, 64))
    _, older = write(tmp_path / "1", {"table": jnp.array(value)}, None)
    value = changed(value, *range(0, 20_000, 1000))
    written, new = write(tmp_path / "2", {"table": jnp.array(value)}, older)
    assert written == (20 * (64 * 4 + 8), value.nbytes)
    assert new_bytes(tmp_path / "2") < written.written_bytes + 6000
    assert_same(new, {"table": value})


def test_a_table_is_written_whole_again_before_its_changes_in_all_exceed_its_size(tmp_path: Path) -> None:
    value, older, sizes = table(), None, []
    for number in range(13):
        written, older = write(tmp_path / str(number), {"table": jnp.array(value)}, older)
        assert_same(older, {"table": value})
        sizes.append(written.written_bytes)
        value = changed(value, *range(10))
    assert table().nbytes // (10 * ROW_BYTES) == 5
    assert sizes == [table().nbytes, *[10 * ROW_BYTES] * 5] * 2 + [table().nbytes]


def test_a_table_of_which_many_rows_change_is_written_whole(tmp_path: Path) -> None:
    _, older = write(tmp_path / "1", {"table": jnp.array(table())}, None)
    for count, is_whole in ((14, False), (15, True)):
        value = changed(table(), *range(count))
        written, new = write(tmp_path / f"{count}", {"table": jnp.array(value)}, older)
        assert written.written_bytes == (table().nbytes if is_whole else count * ROW_BYTES)
        assert_same(new, {"table": value})


def test_a_variable_with_the_name_of_a_part_of_another_one(tmp_path: Path) -> None:
    arrays = {"table": jnp.array(table()), "table~rows": jnp.array(table() + 1), "table~rows/x": jnp.array(table() + 2)}
    _, older = write(tmp_path / "1", arrays, None)
    written, new = write(tmp_path / "2", arrays, older)
    assert written == (table().nbytes, 3 * table().nbytes)
    assert_same(new, arrays)


def test_keys_and_scalars_are_written_whole(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(0), 100)
    _, older = write(tmp_path / "1", {"keys": keys, "one": jnp.float32(1)}, None)
    written, new = write(tmp_path / "2", {"keys": keys, "one": jnp.float32(1)}, older)
    assert written.written_bytes == written.full_bytes
    found = dict(new.each({"keys": None}))
    assert (jax.random.key_data(found["keys"]) == jax.random.key_data(keys)).all()


def test_a_table_over_several_devices_is_compared_as_one(tmp_path: Path) -> None:
    devices = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.sharding.PartitionSpec("x"))
    _, older = write(tmp_path / "1", {"table": jax.device_put(table(), devices)}, None)
    value = changed(table(), 3)
    written, new = write(tmp_path / "2", {"table": jax.device_put(value, devices)}, older)
    assert written.written_bytes == ROW_BYTES
    (found,) = (array for _, array in new.each({"table": devices}))
    assert found.sharding == devices
    np.testing.assert_array_equal(found, value)


def test_where_files_cannot_be_linked_a_table_is_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, older = write(tmp_path / "1", {"table": jnp.array(table())}, None)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with caplog.at_level(logging.WARNING, "dflow"):
        written, new = write(tmp_path / "2", {"table": jnp.array(table())}, older)
    assert written == (table().nbytes, table().nbytes)
    assert "table is written whole: its older version" in caplog.text
    assert "no links here" in caplog.text
    assert_same(new, {"table": table()})


def chunks(arrays: ChangedArrays, part: str) -> list[Path]:
    """Return the chunks of an array of the folder, also of one that is part of another."""
    folder = arrays.path / read_manifest(arrays.path).paths[part]
    return sorted(file for file in folder.iterdir() if file.name.startswith("c"))


@pytest.mark.parametrize("harm", ["missing", "cut off"])
def test_a_table_whose_older_version_is_seen_to_be_damaged_is_written_whole(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, older = write(tmp_path / "1", {"table": jnp.array(table())}, None)
    chunk = chunks(older, "table")[1]
    if harm == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING, "dflow"):
        written, new = write(tmp_path / "2", {"table": jnp.array(table())}, older)
    assert written.written_bytes == table().nbytes
    assert "table is written whole" in caplog.text
    assert_same(new, {"table": table()})


@pytest.mark.parametrize("part", ["table~older", "table~indices", "table~rows"])
@pytest.mark.parametrize("harm", ["flipped", "missing", "folder missing"])
def test_damage_of_any_part_is_an_error_that_names_it(tmp_path: Path, part: str, harm: str) -> None:
    _, older = write(tmp_path / "1", {"table": jnp.array(table())}, None)
    _, new = write(tmp_path / "2", {"table": jnp.array(changed(table(), 3, 9))}, older)
    chunk = chunks(new, part)[-1]
    if harm == "flipped":
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 4
        chunk.write_bytes(data)
    elif harm == "missing":
        chunk.unlink()
    else:
        shutil.rmtree(chunk.parent)
    with pytest.raises(DamagedCheckpoint, match=f"array '{part}' .* is damaged or missing"):
        dict(new.each({"table": None}))


def rewrite(arrays: ChangedArrays, change: Mapping[str, Any], without: str = "") -> None:
    """Replace the table of changes, and leave an array out of the manifest, with its checksum."""
    old = read_manifest(arrays.path)
    types = {name: type for name, type in old.types.items() if name != without}
    metadata = {**old.metadata, "changed rows": {"table": change}}
    (arrays.path / MANIFEST).write_text(manifest_text(old.id, types, old.paths, metadata))


CHANGE = {"older": "table~older", "indices": "table~indices", "rows": "table~rows", "written": 9}


@pytest.mark.parametrize(
    ("change", "without", "text"),
    [
        ({"older": 3}, "", "expected a table of changed rows, got another"),
        (CHANGE, "table~older", "expected the arrays"),
        (CHANGE | {"indices": "table~rows"}, "", "has the changed rows"),
        (CHANGE | {"rows": "table~older"}, "", "has the changed rows"),
        (CHANGE | {"older": "other"}, "", "has the changed rows"),
    ],
)
def test_a_manifest_that_does_not_fit_its_arrays_is_refused(
    tmp_path: Path, change: Mapping[str, Any], without: str, text: str
) -> None:
    other = jnp.zeros(4)
    _, older = write(tmp_path / "1", {"table": jnp.array(table()), "other": other}, None)
    _, new = write(tmp_path / "2", {"table": jnp.array(changed(table(), 3)), "other": other}, older)
    rewrite(new, change, without)
    with pytest.raises(DamagedCheckpoint, match=text):
        read_changed_arrays(new.path)


@pytest.mark.parametrize("indices", [[3, 3], [9, 3], [-1, 3], [3, 64]])
def test_indices_that_are_no_increasing_rows_are_refused(tmp_path: Path, indices: list[int]) -> None:
    _, older = write(tmp_path / "1", {"table": jnp.array(table())}, None)
    _, new = write(tmp_path / "2", {"table": jnp.array(changed(table(), 3, 9))}, older)
    place = chunks(new, "table~indices")[0].parent
    shutil.rmtree(place)
    array = {"table~indices": np.array(indices, np.int64)}
    array_files.write_parts(new.path, array, {"table~indices": place.name})
    with pytest.raises(DamagedCheckpoint, match="'table~indices' has other indices than rows of it, increasing"):
        dict(new.each({"table": None}))


def test_a_folder_without_changed_rows_is_read_as_before(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "1", marker=MANIFEST) as part:
        array_files.fill_folder(part, {"table": table()})
    assert "changed rows" not in json.loads((tmp_path / "1" / MANIFEST).read_text())["content"]["metadata"]
    assert_same(read_changed_arrays(tmp_path / "1"), {"table": table()})
