"""An array in zarr's format (version 3): uncompressed chunks with checksums.

A folder to read may come from anywhere. Zarr's format lets small files unpack to any size, so only the codecs that are
written are read, and only from regular files of the expected sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from dflow.lowering.files.object_path import CONTEXT, Location, ObjectPath
from dflow.lowering.files.regular_file import read_regular, regular_size
from dflow.tracing.ir.types import ArrayType

#: Largest size of `zarr.json`, the file that describes an array.
_MOST_BYTES = 1 << 20
_CHECKSUM_BYTES = 4


def create_array(
    folder: Location,
    dtype: Any,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    *,
    flushed: bool = False,
    is_shared: bool = False,
) -> Any:
    """Return TensorStore's future of a new array. Chunks are flushed only if `flushed`, when they are written.

    is_shared  whether other processes make the same array, and write other chunks of it
    """
    spec = _spec(folder, dtype, flushed=flushed) | {
        "create": True,
        "open": is_shared,
        "store_data_equal_to_fill_value": True,
    }
    spec["metadata"] |= {
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        # Chunks share one folder, since each folder takes time to make, to flush and to remove.
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
    }
    return tensorstore.open(spec, dtype=dtype, shape=shape, context=CONTEXT)


def open_array(folder: Location, dtype: Any, shape: Sequence[int]) -> Any:
    """Return TensorStore's future of an array to read; pass its result to `check_array` before.

    Raises OSError if `zarr.json` is a pipe or device; the future raises ValueError for an array of
    another shape, dtype or codec.
    """
    if not isinstance(folder, ObjectPath):  # a store has no pipes
        read_regular(folder / "zarr.json", _MOST_BYTES)
    spec = _spec(folder, dtype) | {"open": True, "fill_missing_data_reads": False}
    return tensorstore.open(spec, dtype=dtype, shape=shape, context=CONTEXT)


def check_array(folder: Location, store: Any) -> None:
    """Raise ValueError or OSError unless the folder holds all chunks of the opened array, each of its full size.

    In an object store, which tells no sizes, each chunk is checked when it is read.
    """
    chunk, shape = store.chunk_layout.read_chunk.shape or (), store.shape
    if any(part > max(1, size) for part, size in zip(chunk, shape, strict=True)):
        raise ValueError(f"it is stored in chunks of shape {[*chunk]}")
    if isinstance(folder, ObjectPath):
        return
    count = math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))
    expected = math.prod(chunk) * store.dtype.numpy_dtype.itemsize + _CHECKSUM_BYTES
    chunks = [file for file in folder.rglob("*") if str(file.relative_to(folder)).startswith("c")]
    sizes = [regular_size(file) for file in chunks if file.is_symlink() or not file.is_dir()]
    if len(sizes) != count:
        raise ValueError(f"it has {len(sizes)} chunks instead of {count}")
    for size in sizes:
        if size != expected:
            raise ValueError(f"a chunk has {size} bytes instead of {expected}")


def _spec(folder: Location, dtype: Any, flushed: bool = False) -> dict[str, Any]:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    file = {"driver": "file", "path": f"{folder}/", "file_io_sync": flushed}
    return {
        "driver": "zarr3",
        "kvstore": folder.kvstore() if isinstance(folder, ObjectPath) else file,
        "metadata": {"codecs": [little if dtype.itemsize > 1 else {"name": "bytes"}, {"name": "crc32c"}]},
    }


def stored_dtype(dtype: Any) -> Any:
    """Return the dtype on the disk: the array's own, or uint8 if TensorStore does not support it."""
    try:
        tensorstore.dtype(dtype)
    except ValueError:
        return np.dtype("uint8")
    return np.dtype(dtype)


def stored_type(type: ArrayType) -> tuple[Any, tuple[int, ...]]:
    """Return the dtype and the shape on the disk; those of their data for PRNG keys."""
    if jnp.issubdtype(type.dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, type.struct)
        return np.dtype(data.dtype), data.shape
    return stored_dtype(type.dtype), type.shape
