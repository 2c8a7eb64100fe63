"""Arrays of known types in one buffer, as tasks send them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.values.alignment import aligned, aligned_zeros
from dflow.lowering.values.host_values import may_stay_on_host
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import key_implementation, parse_dtype

#: Most dimensions of a NumPy array.
MAX_RANK = 64
MAX_ARRAY_BYTES = 1 << 62


class PayloadLayout:
    """The positions of arrays in a buffer: one after another, in row-major order, each aligned.

    types       the dtype and the shape of each
    fill        of an array, whose first rows alone are in the buffer, the value of its other rows; it is followed by
                the number of the first rows, which is not in the buffer
    size_bytes  size of the buffer; nothing follows the last array
    raises      ParseError for a dtype that does not exist, WireError for an invalid shape
    """

    def __init__(self, types: Sequence[tuple[str, tuple[int, ...]]], fill: int | None = None) -> None:
        self.size_bytes, self._fill = 0, fill
        types = types if fill is None else types[:1]
        #: The shape of each array, and its dtype, number of elements and offset.
        self._arrays: list[tuple[tuple[int, ...], tuple[np.dtype[Any], int, int]]] = []
        #: The indices of the arrays that do not stay NumPy arrays, with the function that converts each.
        self._converted: list[tuple[int, Callable[[Any], jax.Array]]] = []
        for index, (name, shape) in enumerate(types):
            dtype = parse_dtype(name)
            convert: Callable[[Any], jax.Array] | None = None
            if jnp.issubdtype(dtype, jax.dtypes.prng_key):
                convert = _keys_of(key_implementation(dtype))
                words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
                dtype, shape = np.dtype(words.dtype), (*shape, *words.shape)
            size_bytes = _size(dtype, shape)
            if convert is None and not may_stay_on_host(dtype, size_bytes):
                convert = _on_device
            if convert is not None:
                self._converted.append((index, convert))
            start = aligned(self.size_bytes)
            self._arrays.append((shape, (dtype, math.prod(shape), start)))
            self.size_bytes = start + size_bytes
        if fill is not None and (self.size_bytes == 0 or len(self._arrays) != 1):
            raise WireError(f"value sent by its first rows: expected an array with elements, got {types}")

    def values(self, buffer: bytes | bytearray | memoryview) -> list[Any]:
        """Return the arrays in `buffer`, without a copy, as NumPy or JAX arrays; see `host_values`.

        raises  WireError when the buffer has another size
        """
        if self._fill is not None:
            return self._counted(buffer, self._fill)
        if len(buffer) != self.size_bytes:
            raise WireError(f"the values take {self.size_bytes} bytes, but {len(buffer)} bytes came")
        # Not `np.ndarray(..., buffer)`: it would refer to the memory itself, which is freed at the end of `buffer`.
        arrays: list[Any] = [np.frombuffer(buffer, *of).reshape(shape) for shape, of in self._arrays]
        for index, convert in self._converted:
            arrays[index] = convert(arrays[index])
        return arrays

    def _counted(self, buffer: bytes | bytearray | memoryview, fill: int) -> list[Any]:
        """Return the whole array, of whose rows the first ones are in `buffer`, and their number, i32[]."""
        [(shape, (dtype, _, _))] = self._arrays
        row_bytes = self.size_bytes // shape[0]
        if len(buffer) % row_bytes or len(buffer) > self.size_bytes:
            raise WireError(
                f"rows of {row_bytes} bytes, at most {shape[0]}: expected them alone, got {len(buffer)} bytes"
            )
        count = len(buffer) // row_bytes
        array: Any = aligned_zeros(dtype, shape)
        array[:count] = np.frombuffer(buffer, dtype).reshape(count, *shape[1:])
        if fill:
            array[count:] = fill
        for _, convert in self._converted:
            array = convert(array)
        return [array, np.int32(count)]


def _size(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    if len(shape) > MAX_RANK or any(extent < 0 for extent in shape):
        raise WireError(f"shape of a value: expected at most {MAX_RANK} extents of 0 or more, got {shape}")
    # An array without elements has dimensions too, and NumPy multiplies the nonzero ones.
    if math.prod(extent or 1 for extent in shape) * dtype.itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"size of a value: expected at most {MAX_ARRAY_BYTES} bytes, got {dtype}{list(shape)}")
    return math.prod(shape) * dtype.itemsize


def _on_device(array: np.ndarray[Any, Any]) -> jax.Array:
    placed: jax.Array = jax.device_put(array, may_alias=True)
    return placed


def _keys_of(implementation: str) -> Callable[[Any], jax.Array]:
    return lambda words: jax.random.wrap_key_data(words, impl=implementation)
