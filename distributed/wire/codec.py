"""Encoding of messages and arrays as bytes, and decoding.

Why: everything that crosses a process border passes here, so this one file decides what bytes from a peer may become.

Invariants: nothing is pickled and no bytes name code. A message is msgpack of one struct of `MESSAGES`,
checked against its types. An array is its elements in row-major order, little-endian, without a header: the message
has its dtype and shape, and the payload's size must match both. A PRNG key is its 32-bit words.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt

from dflow.distributed.wire import messages
from dflow.distributed.wire.messages.basic import ArrayInfo
from dflow.distributed.wire.messages.message import Message
from dflow.lowering.values.alignment import ALIGNMENT_BYTES
from dflow.tracing.errors import WireError

if TYPE_CHECKING:
    # The coordinator and the launcher send no arrays, and start in half the time without JAX.
    import jax


class Parts:
    """A payload to send in several parts of memory, one after another; `len` is the total number of bytes."""

    __slots__ = ("parts", "size_bytes")

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self.parts, self.size_bytes = parts, sum(map(len, parts))

    def __len__(self) -> int:
        return self.size_bytes


#: Bytes after a message when received, and when sent.
Payload = bytes | bytearray | memoryview
SentPayload = Payload | Parts

#: Most dimensions of a NumPy array.
MAX_RANK = 64
MAX_ARRAY_BYTES = 1 << 62
#: At most this many known names are in an error about another name.
MAX_KNOWN = 20

Value = TypeVar("Value")

_NUMPY_DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_ML_DTYPES = (
    *("bfloat16", "int4", "uint4", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)

#: Every dtype that can be sent, by its name.
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {name: np.dtype(name).newbyteorder("<") for name in _NUMPY_DTYPES}
    | {name: np.dtype(getattr(ml_dtypes, name)) for name in _ML_DTYPES}
)

#: The algorithm and the number of words of the keys that can be sent, by dtype.
KEYS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"key<fry>": ("threefry2x32", 2), "key<rbg>": ("rbg", 4), "key<urbg>": ("unsafe_rbg", 4)}
)

_ZEROS = bytes(ALIGNMENT_BYTES)

#: Up to this many bytes, a copy takes less time than making a view.
_COPIED_BYTES = 1 << 10

#: The dtypes whose elements have the same layout in memory as when sent.
_AS_THEY_ARE = frozenset(dtype for dtype in DTYPES.values() if dtype.isnative)


def _message_files() -> Iterator[ModuleType]:
    """Yield the files of messages: those of `wire/messages/`, and `<subject>_messages.py` of each other room."""
    for file in pkgutil.iter_modules(messages.__path__):
        if file.name != "message":
            yield importlib.import_module(f"{messages.__name__}.{file.name}")
    package, rooms = __package__.rpartition(".")[0], Path(__file__).parents[1]
    for path in sorted(rooms.glob("*/*_messages.py")):
        yield importlib.import_module(f"{package}.{path.parent.name}.{path.stem}")


#: Every message that is sent: each class in a file of messages, except the bases.
MESSAGES: tuple[type[Message], ...] = tuple(
    found
    for file in _message_files()
    for found in vars(file).values()
    if isinstance(found, type) and issubclass(found, Message) and found.__module__ == file.__name__
)

#: Their union, for a decoder.
ANY_MESSAGE: Any = functools.reduce(operator.or_, MESSAGES)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(ANY_MESSAGE)


def encode_message(message: Message) -> bytes:
    """Encode the message as msgpack.

    raises  WireError if a field holds a value of a type that cannot be sent
    """
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"{type(message).__name__} cannot be sent: {error}") from error


def decode_message(data: Payload) -> Message:
    """Decode a message.

    raises  WireError if `data` is not msgpack, or not a message of this protocol with fields of the declared types
    """
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{len(data)} bytes are no message of this protocol: {error}") from error


def encode_array(value: jax.Array | npt.NDArray[Any]) -> bytes | memoryview:
    """Return the elements of `value` as bytes; a view if it is large, on the host, contiguous and little-endian.

    Waits until a `jax.Array` is computed.

    raises  WireError for dtypes that cannot be sent, and for arrays spread over processes
    """
    is_numpy = type(value) is np.ndarray
    if is_numpy and value.nbytes <= _COPIED_BYTES and value.dtype in _AS_THEY_ARE:
        return value.tobytes()
    if not is_numpy or value.dtype in _AS_THEY_ARE:
        # Of a contiguous array on the host, whose dtype Python's buffers know: four times as fast as by NumPy.
        buffer: Any = value
        try:  # `suppress` would cost as much as the view
            view = memoryview(buffer).cast("B")
            return view if view.nbytes > _COPIED_BYTES else view.tobytes()
        except (BufferError, TypeError, ValueError):
            pass
    if value.dtype in _AS_THEY_ARE and getattr(value, "is_fully_addressable", True):
        host = np.asarray(value, order="C")
    else:
        host = _host_array(value)
        host = np.ascontiguousarray(host, dtype=parse_dtype(host.dtype.name))
    return host.reshape(-1).view(np.uint8).data


def decode_array(dtype: str, shape: Sequence[int], payload: Payload) -> Any:
    """Return the NumPy array with the elements `payload`, without a copy, or the `jax.Array` of keys.

    raises  WireError if `dtype` cannot be sent, or if the size of `payload` does not match dtype and shape
    """
    shape = tuple(shape)
    wanted = array_bytes(dtype, shape)
    if len(payload) != wanted:
        raise WireError(f"{dtype}{list(shape)} takes {wanted} bytes but the payload has {len(payload)}")
    if dtype in KEYS:
        from jax import random

        algorithm, words = KEYS[dtype]
        return random.wrap_key_data(decode_array("uint32", (*shape, words), payload), impl=algorithm)
    return np.frombuffer(payload, dtype=parse_dtype(dtype)).reshape(shape)


def encode_values(values: Sequence[jax.Array | npt.NDArray[Any]]) -> SentPayload:
    """Return the elements of `values` one after another, each aligned to `ALIGNMENT_BYTES`: see `PayloadLayout`.

    Waits until they are computed. Large arrays are views, so they must not change until they are sent; raises like
    `encode_array`.
    """
    if len(values) == 1:
        return encode_array(values[0])
    parts: list[bytes | memoryview] = []
    padding = 0
    for value in values:
        if padding:
            parts.append(_ZEROS[:padding])
        part = encode_array(value)
        parts.append(part)
        padding = -len(part) % ALIGNMENT_BYTES
    return Parts(parts)


def joined(payload: SentPayload) -> Payload:
    """Return the payload as one object."""
    return b"".join(payload.parts) if isinstance(payload, Parts) else payload


def parts_of(payload: SentPayload) -> Sequence[bytes | bytearray | memoryview]:
    """Return the parts of a payload that are not empty."""
    return [part for part in payload.parts if part] if isinstance(payload, Parts) else [payload] if payload else []


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


@functools.lru_cache(maxsize=4096)
def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Size of an array in bytes, at bounded cost for any shape a peer sends; raises WireError for an invalid type."""
    if dtype in KEYS:
        return array_bytes("uint32", (*shape, KEYS[dtype][1]))
    if len(shape) > MAX_RANK:
        raise WireError(f"a shape of {len(shape)} extents; at most {MAX_RANK} are taken")
    if any(extent < 0 for extent in shape):
        raise WireError(f"shape {shape} has a negative extent; extents are 0 or more")
    itemsize = parse_dtype(dtype).itemsize
    # An array without elements has dimensions too, and NumPy multiplies the nonzero ones.
    if math.prod(extent or 1 for extent in shape) * itemsize > MAX_ARRAY_BYTES:
        raise WireError(f"{dtype}{list(shape)} is larger than any array; at most {MAX_ARRAY_BYTES} bytes are taken")
    return math.prod(shape) * itemsize


@functools.lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name of a dtype, cached because NumPy builds the string each time."""
    return dtype.name


def parse_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype called `name`; raises WireError if it cannot be sent."""
    try:
        return DTYPES[name]
    except KeyError:
        raise WireError(f"dtype {name!r} does not travel; these do: {', '.join(sorted([*DTYPES, *KEYS]))}") from None


def named(values: Mapping[str, Value], name: str, what: str) -> Value:
    """Return the value of a name that a peer sent, of the kind `what`. Raises WireError if there is none."""
    if name not in values:
        known = sorted(values)
        more = f" and {len(known) - MAX_KNOWN} more" if len(known) > MAX_KNOWN else ""
        raise WireError(f"{what}: expected one of {', '.join(known[:MAX_KNOWN]) or 'none'}{more}, got {name[:64]!r}")
    return values[name]


def _host_array(value: jax.Array | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if value.dtype.name in KEYS:
        from jax import random

        value = random.key_data(value)
    parse_dtype(value.dtype.name)
    if not getattr(value, "is_fully_addressable", True):
        raise WireError(
            f"an array of shape {value.shape} is spread over several processes; send the shards of each process"
        )
    return np.asarray(value)
