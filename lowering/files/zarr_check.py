"""Checks of an array's folder before TensorStore reads it.

Why: a folder may come from anywhere, and zarr's format lets small files unpack to any size. Invariant: an array that
passes is stored like dflow's own, uncompressed and with checksums, in regular files of the expected sizes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflow.lowering.files.regular_file import read_regular, regular_size

#: Largest size of `zarr.json`, the file that describes an array.
_MOST_BYTES = 1 << 20
_CODECS = ["bytes", "crc32c"]
_CHECKSUM_BYTES = 4


class _Chunks(msgspec.Struct):
    chunk_shape: list[int]


class _Grid(msgspec.Struct):
    name: Literal["regular"]
    configuration: _Chunks


class _Codec(msgspec.Struct):
    name: str


class _Array(msgspec.Struct):
    """The part of `zarr.json` that determines the size of a chunk. TensorStore checks the rest."""

    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: list[int]
    chunk_grid: _Grid
    codecs: list[_Codec]
    storage_transformers: list[Any] = []


def check_array(folder: Path, dtype: Any, shape: Sequence[int]) -> None:
    """Raise ValueError or OSError unless the folder holds all chunks of an array of this dtype and shape."""
    form = msgspec.json.decode(read_regular(folder / "zarr.json", _MOST_BYTES), type=_Array)
    chunk, codecs = form.chunk_grid.configuration.chunk_shape, [codec.name for codec in form.codecs]
    if form.shape != [*shape]:
        raise ValueError(f"its shape is {form.shape} in zarr.json")
    if len(chunk) != len(shape) or not all(1 <= part <= max(1, size) for part, size in zip(chunk, shape, strict=True)):
        raise ValueError(f"it is stored in chunks of shape {chunk}")
    if codecs != _CODECS or form.storage_transformers:
        raise ValueError(f"it is stored by the codecs {codecs}, and dflow stores by {_CODECS}")
    count = math.prod(-(-size // part) for size, part in zip(shape, chunk, strict=True))
    _check_chunks(folder, count, math.prod(chunk) * dtype.itemsize + _CHECKSUM_BYTES)


def _check_chunks(folder: Path, count: int, size_bytes: int) -> None:
    found = 0
    for inner, _, files in os.walk(folder):
        for name in files:
            file = Path(inner, name)
            key = str(file.relative_to(folder))
            if key.startswith("c"):
                found += 1
                if (has := regular_size(file)) != size_bytes:
                    raise ValueError(f"chunk {key} has {has} bytes instead of {size_bytes}")
    if found != count:
        raise ValueError(f"it has {found} chunks instead of {count}")
