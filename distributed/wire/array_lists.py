"""Several arrays in one payload: one after the other, their types in the message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from dflow.distributed.wire.codec import Payload, array_bytes, decode_array, dtype_name, encode_array
from dflow.distributed.wire.messages.arrays import ArrayInfo
from dflow.tracing.errors import WireError

if TYPE_CHECKING:
    import jax


def encode_arrays(arrays: Sequence[jax.Array | npt.NDArray[Any]]) -> tuple[tuple[ArrayInfo, ...], Payload]:
    """Return the types and the elements of `arrays`. Waits until they are computed; raises like `encode_array`."""
    infos = tuple(ArrayInfo(dtype_name(array.dtype), tuple(array.shape)) for array in arrays)
    encoded = [encode_array(array) for array in arrays]
    return infos, encoded[0] if len(encoded) == 1 else b"".join(encoded)


def decode_arrays(infos: Sequence[ArrayInfo], payload: Payload) -> list[npt.NDArray[Any]]:
    """Split `payload` into arrays of these types, without a copy.

    raises  WireError if a dtype cannot be sent, or the size of the payload does not match the types
    """
    sizes = [array_bytes(info.dtype, info.shape) for info in infos]
    if sum(sizes) != len(payload):
        shown = ", ".join(f"{info.dtype}{list(info.shape)}" for info in infos) or "no arrays"
        raise WireError(f"{shown} do not fill a payload of {len(payload)} bytes")
    view = memoryview(payload)
    ends = itertools.accumulate(sizes)
    return [
        decode_array(info.dtype, info.shape, view[end - size : end])
        for info, size, end in zip(infos, sizes, ends, strict=True)
    ]
