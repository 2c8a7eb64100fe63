"""Arrays as memory of their chunk files: the same values as when they are read, whatever their chunks."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.files import array_files, divided_array, mapped_chunks
from dflow.lowering.files.array_files import divided, read_arrays
from dflow.tracing.errors import DamagedCheckpoint
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice
from tests.effort import examples
from tests.lowering.files.written_arrays import write_arrays

DTYPES = st.sampled_from([np.float32, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float64])
#: Small limits, so that small arrays have several chunks of whole pages.
SMALL = [
    (mapped_chunks, "LEAST_BYTES", 1),
    (array_files, "LEAST_BYTES", 1),
    (array_files, "_CHUNK_BYTES", 128 << 10),
    (divided_array, "_CHUNK_BYTES", 128 << 10),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in SMALL:
        monkeypatch.setattr(module, name, value)


@given(DTYPES, st.integers(1, 40_000), st.sampled_from([(), (1,), (3,), (16,), (2, 5)]), st.integers(1, 3))
@settings(max_examples=examples(30), deadline=None)
def test_a_mapped_array_has_the_values_that_are_read(dtype: Any, rows: int, rest: tuple[int, ...], parts: int) -> None:
    value = np.random.default_rng(rows).integers(0, 2**7, (rows, *rest)).astype(dtype)
    cuts = np.linspace(0, rows, parts + 1).astype(int)
    slices = [AxisSlice(0, int(start), int(end - start)) for start, end in itertools.pairwise(cuts)]
    arrays = {
        "whole": value,
        "parts": divided(ArrayType(value.dtype, value.shape), slices, np.split(value, cuts[1:-1])),
    }
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        for module, name, limit in SMALL:
            patch.setattr(module, name, limit)
        write_arrays(Path(place) / "c", arrays)
        files = read_arrays(Path(place) / "c")
        mapped, read = files.mapped(arrays), files.read(dict.fromkeys(arrays))
        assert value.nbytes > 128 << 10 or "whole" in mapped
        for found in (*mapped.values(), *read.values()):
            assert (found.dtype, found.shape, found.tobytes()) == (value.dtype, value.shape, value.tobytes())


@pytest.mark.usefixtures("small")
def test_a_program_uses_the_pages_of_the_files_and_changes_none(tmp_path: Path) -> None:
    value = np.arange(80_000, dtype=np.float32).reshape(-1, 16)
    write_arrays(tmp_path / "c", {"x": value})
    array = jax.device_put(read_arrays(tmp_path / "c").mapped(["x"])["x"])
    assert array.unsafe_buffer_pointer() % mmap.PAGESIZE == 0
    assert f"{tmp_path}/c/x/c.2.0" in Path("/proc/self/maps").read_text()
    changed = jax.jit(lambda x: x.at[0].set(-1), donate_argnums=0)(array)
    assert changed[0, 0] == -1
    del array, changed
    np.testing.assert_array_equal(read_arrays(tmp_path / "c").read({"x": None})["x"], value)
    assert f"{tmp_path}/c/x/c.2.0" not in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("small")
def test_chunks_that_are_missing_cut_off_or_of_part_of_a_page_are_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = np.arange(200_000, dtype=np.float32)
    write_arrays(tmp_path / "c", {"x": value})
    with (tmp_path / "c/x/c.1").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(DamagedCheckpoint, match="array 'x'"):
        read_arrays(tmp_path / "c").mapped(["x"])
    (tmp_path / "c/x/c.1").unlink()
    with pytest.raises(DamagedCheckpoint, match="array 'x'"):
        read_arrays(tmp_path / "c").mapped(["x"])
    monkeypatch.setattr(array_files, "_CHUNK_BYTES", 10_000)
    write_arrays(tmp_path / "unpaged", {"x": value})
    assert not read_arrays(tmp_path / "unpaged").mapped(["x"])
