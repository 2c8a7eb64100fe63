"""Tensors of the Open Inference Protocol v2: from a request's bytes to NumPy arrays, and back.

A tensor is a JSON list of numbers, or bytes after the JSON (Triton's binary extension; the header
`Inference-Header-Content-Length` gives the length of the JSON). Invariant: a value arrives exactly, or the request is
refused: a number that the dtype cannot hold, a list of another size than the shape, and a NaN in JSON are errors.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from dflow.serving.json_errors import list_fault
from dflow.serving.request_members import (
    INPUT_CHECKS,
    OUTPUT_CHECKS,
    REQUEST_CHECKS,
    InferenceRequest,
    RefusedRequest,
    SentTensor,
    WantedOutput,
    check_parameters,
    decode_members,
)

#: The protocol's dtypes of numbers.
DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(bool),
    **{f"{sign}INT{bits}": np.dtype(f"{sign}int{bits}".lower()) for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
#: The dtypes of inputs: strings are objects, `bytes` or `str`.
_INPUTS = {**DATATYPES, "BYTES": np.dtype(object)}
_NAMES = {dtype: name for name, dtype in _INPUTS.items()}

#: The length of a string in BYTES.
_LENGTH = struct.Struct("<I")

BINARY_HEADER = "Inference-Header-Content-Length"


#: The first bracket of a list, and the second one of a list of lists.
_OPENING = re.compile(rb"\s*\[\s*(\[)?")
#: Bytes of JSON that are decoded, and numbers that are encoded, in one call, which keeps other threads from running.
_PIECE_BYTES, _PIECE_NUMBERS = 1 << 18, 1 << 16


def datatype_of(dtype: Any) -> str | None:
    """Return the protocol's name of a dtype, or None if it has none."""
    return _NAMES.get(np.dtype(dtype))


def decode_request(body: bytes, json_bytes: str | None) -> tuple[InferenceRequest, dict[str, np.ndarray[Any, Any]]]:
    """Return a request and its input arrays by name. Raises RefusedRequest.

    json_bytes  the value of BINARY_HEADER
    """
    size = len(body) if json_bytes is None else _json_size(json_bytes, len(body))
    request = decode_members(memoryview(body)[:size], InferenceRequest)
    check_parameters("the request", request.parameters, REQUEST_CHECKS)
    for wanted in request.outputs or ():
        check_parameters(f"output {wanted.name!r}", wanted.parameters, OUTPUT_CHECKS)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    rest = memoryview(body)[size:]
    for tensor in request.inputs:
        if tensor.name in arrays:
            raise RefusedRequest(400, f"input {tensor.name!r}: expected once, got twice")
        arrays[tensor.name], rest = _array_of(tensor, rest)
    if len(rest):
        raise RefusedRequest(400, f"binary data: {len(rest)} bytes belong to no input; state each binary_data_size")
    return request, arrays


def _json_size(text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise RefusedRequest(
            400, f"{BINARY_HEADER}: expected a number up to {most}, the size of the body, got {text!r}"
        )
    return int(text)


def _array_of(tensor: SentTensor, rest: memoryview) -> tuple[np.ndarray[Any, Any], memoryview]:
    """Return the array of a tensor, and the bytes after its own."""
    subject = f"input {tensor.name!r}"
    dtype = dtype_of(subject, tensor.datatype, tensor.shape)
    check_parameters(subject, tensor.parameters, INPUT_CHECKS)
    size = tensor.parameters.get("binary_data_size")
    data = bytes(tensor.data)
    if (size is None) == (not data):
        given = "neither" if size is None else "both"
        raise RefusedRequest(400, f"{subject}: expected data or the parameter binary_data_size, got {given}")
    if size is None:
        return _from_json(subject, data, dtype, tensor.shape), rest
    due = bytes_of(dtype, tensor.shape)
    if type(size) is not int or size != (size if due is None else due) or not 0 <= size <= len(rest):
        raise RefusedRequest(
            400,
            f"{subject}: expected {'its' if due is None else due} bytes of binary data for {tensor.datatype}"
            f"{tensor.shape}, got binary_data_size {size!r} and {len(rest)} bytes",
        )
    return array_of_bytes(subject, rest[:size], dtype, tensor.shape), rest[size:]


def dtype_of(subject: str, datatype: str, shape: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype of a tensor. Raises RefusedRequest, also for a shape that no array has."""
    if (dtype := _INPUTS.get(datatype)) is None:
        raise RefusedRequest(400, f"{subject}: expected a datatype of {', '.join(_INPUTS)}, got {datatype!r}")
    if any(dim < 0 for dim in shape) or len(shape) > 64:
        raise RefusedRequest(400, f"{subject}: expected a shape of sizes from 0, got {list(shape)}")
    if math.prod(dim for dim in shape if dim) * dtype.itemsize > sys.maxsize:  # NumPy refuses it, also beside a 0
        raise RefusedRequest(400, f"{subject}: expected a shape of at most {sys.maxsize} bytes, got {list(shape)}")
    return dtype


def bytes_of(dtype: np.dtype[Any], shape: Sequence[int]) -> int | None:
    """Return the size of an array in bytes; None for strings, whose sizes differ."""
    return None if dtype.kind == "O" else math.prod(shape) * dtype.itemsize


def zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return an array of zeros, or of empty strings."""
    return np.full(shape, b"", object) if dtype.kind == "O" else np.zeros(shape, dtype)


def _strings_of_bytes(subject: str, data: bytes | memoryview, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the strings of BYTES, each after its length as 4 bytes. Raises RefusedRequest for another number."""
    due, at, length_at = math.prod(shape), 0, _LENGTH.unpack_from
    found: list[bytes] = []
    data = bytes(data)
    while len(found) < due and at + _LENGTH.size <= len(data):
        start = at + _LENGTH.size
        at = start + length_at(data, at)[0]
        found.append(data[start:at])
    if len(found) != due or at != len(data):
        raise RefusedRequest(
            400, f"{subject}: expected {due} strings, each after its length as 4 bytes, got {len(data)} other bytes"
        )
    array = np.empty(due, object)
    array[:] = found
    return array.reshape(shape)


def array_of_bytes(
    subject: str, data: bytes | memoryview, dtype: np.dtype[Any], shape: Sequence[int]
) -> np.ndarray[Any, Any]:
    """Return the array of as many bytes as it has. Raises RefusedRequest for bytes that are no BOOL or no BYTES."""
    if dtype.kind == "O":
        return _strings_of_bytes(subject, data, shape)
    if dtype.kind == "b" and len(data) and int(np.frombuffer(data, np.uint8).max()) > 1:
        raise RefusedRequest(400, f"{subject}: expected the bytes 0 and 1 for BOOL, got another")
    array = np.frombuffer(data, dtype).reshape(shape)
    return array if array.flags.aligned else array.copy()


@cache
def _list_decoder(kind: str, depth: int) -> msgspec.json.Decoder[Any]:
    item: Any = {"b": bool, "i": int, "u": int, "O": str}.get(kind, float)
    for _ in range(depth):
        item = list[item]
    return msgspec.json.Decoder(item)


def _array_of_list(data: bytes, dtype: np.dtype[Any], depth: int) -> np.ndarray[Any, Any]:
    """Return the array of a list in JSON; a long list is decoded in pieces, between which other threads run."""
    decode = _list_decoder(dtype.kind, depth).decode
    if depth == 0 or len(data) <= _PIECE_BYTES or dtype.kind == "O":  # strings may have the ends of items
        return np.array(decode(data), dtype)
    end, arrays, start, opening = _end_of_item(depth), [], 0, b""
    while found := end.search(data, start + _PIECE_BYTES):
        arrays.append(np.array(decode(opening + data[start : found.end() - 1] + b"]"), dtype))
        start, opening = found.end(), b"["
    arrays.append(np.array(decode(opening + data[start:]), dtype))
    if not all(map(len, arrays)):
        raise ValueError("a comma without a value")
    return np.concatenate(arrays)


@cache
def _end_of_item(depth: int) -> re.Pattern[bytes]:
    """Return the pattern of the end of an item, with its comma, in the outermost of nested lists of numbers."""
    return re.compile(rb"(?:\]\s*){%d}," % (depth - 1))


def _from_json(subject: str, data: bytes, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the array of a JSON list, flat or nested as the shape, or of the one value of a scalar."""
    opening = _OPENING.match(data)
    is_nested = opening is not None and opening[1] is not None
    depth = max(1, len(shape)) if is_nested else int(bool(shape) or opening is not None)
    try:
        with np.errstate(over="ignore"):  # found below
            array = _array_of_list(data, dtype, depth)
    except (msgspec.MsgspecError, OverflowError, ValueError) as error:
        got = list_fault(error, is_whole=len(data) <= _PIECE_BYTES)
        raise RefusedRequest(
            400, f"{subject}: expected {datatype_of(dtype)} of shape {list(shape)}, got {got}"
        ) from None
    if dtype.kind not in "biuO" and not np.isfinite(array.astype(np.float64)).all():
        raise RefusedRequest(400, f"{subject}: expected numbers that {datatype_of(dtype)} can hold, got a larger one")
    if array.size != math.prod(shape) or (is_nested and array.size and array.shape != tuple(shape)):
        got = f"a list of shape {list(array.shape)}" if is_nested else f"{array.size} values"
        raise RefusedRequest(
            400, f"{subject}: expected {math.prod(shape)} values for its shape {list(shape)}, got {got}"
        )
    return array.reshape(shape)


def check_outputs(request: InferenceRequest, names: Collection[str]) -> None:
    """Raise RefusedRequest unless each wanted output is one of `names`, once.

    Why apart from `encode_response`: a call may write variables, so a request is refused before it.
    """
    seen: set[str] = set()
    for one in request.outputs or ():
        if one.name not in names:
            raise RefusedRequest(400, f"output {one.name!r}: expected one of {', '.join(names) or 'none'}")
        if one.name in seen:
            raise RefusedRequest(400, f"output {one.name!r}: expected once, got twice")
        seen.add(one.name)


def encode_response(
    head: Mapping[str, Any], arrays: Mapping[str, np.ndarray[Any, Any]], request: InferenceRequest
) -> tuple[list[bytes], int | None]:
    """Return the parts of a response's body, and the length of its JSON if bytes follow. Raises RefusedRequest.

    head    the fields beside `outputs`
    arrays  all outputs by name; the request, which passed `check_outputs`, says which of them it wants, and which in
            binary form
    """
    by_default = request.parameters.get("binary_data_output", False)
    wanted = [WantedOutput(name) for name in arrays] if not request.outputs else request.outputs
    outputs, blobs = [], []
    for one in wanted:
        array = arrays[one.name]
        entry: dict[str, Any] = {"name": one.name, "datatype": datatype_of(array.dtype), "shape": list(array.shape)}
        if one.parameters.get("binary_data", by_default):
            blobs.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": array.nbytes}
        else:
            entry["data"] = _listed(one.name, array)
        outputs.append(entry)
    encoded = msgspec.json.encode({**head, "outputs": outputs})
    return [encoded, *blobs], len(encoded) if blobs else None


def _listed(name: str, array: np.ndarray[Any, Any]) -> msgspec.Raw:
    """Return the values as a flat list in JSON, encoded in pieces, between which other threads run."""
    wide = array if array.dtype.kind in "biuf" else array.astype(np.float32)
    if wide.dtype.kind == "f" and not np.isfinite(wide).all():
        raise RefusedRequest(
            422, f"output {name!r}: NaN or infinity, which JSON cannot hold; request it with the parameter binary_data"
        )
    flat = wide.reshape(-1)
    starts = range(0, flat.size, _PIECE_NUMBERS)
    pieces = [msgspec.json.encode(flat[start : start + _PIECE_NUMBERS].tolist())[1:-1] for start in starts]
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
