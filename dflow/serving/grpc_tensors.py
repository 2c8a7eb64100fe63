"""Tensors of the Open Inference Protocol over gRPC: from a request's message to NumPy arrays, and back.

The values of a request are bytes, one entry of `raw_input_contents` for each input, or typed lists of numbers in the
`contents` of each input; the response has the form of its request. Invariant: a value arrives exactly, or the request
is refused.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflow.serving.grpc_messages import MESSAGES
from dflow.serving.inference_service import InferenceAnswer
from dflow.serving.request_members import (
    OUTPUT_CHECKS,
    REQUEST_CHECKS,
    InferenceRequest,
    RefusedRequest,
    WantedOutput,
    check_parameters,
)
from dflow.serving.tensors import array_of_bytes, bytes_of, datatype_of, dtype_of

#: The field of `contents` that has the values of a datatype. FP16 and BF16 have none.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_REQUEST_CHECKS = {"timeout": REQUEST_CHECKS["timeout"]}
_OUTPUT_CHECKS = {"classification": OUTPUT_CHECKS["classification"]}
#: Most outputs that a request names. Two bytes of it name one, which takes 6 us and 160 bytes of memory to decode.
_MOST_OUTPUTS = 10_000
#: Numbers that are converted in one call, which keeps other threads from running.
_PIECE_NUMBERS = 1 << 16


def parameters_of(message: Any) -> dict[str, Any]:
    """Return the parameters of a message by name."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()}
    return {name: choice and getattr(message.parameters[name], choice) for name, choice in chosen.items()}


def decode_message(message: Any) -> tuple[InferenceRequest, dict[str, np.ndarray[Any, Any]]]:
    """Return a `ModelInferRequest` without its inputs, and the input arrays by name. Raises RefusedRequest."""
    if (count := len(message.outputs)) > _MOST_OUTPUTS:
        raise RefusedRequest(400, f"outputs: expected at most {_MOST_OUTPUTS}, got {count}")
    wanted = [WantedOutput(one.name, parameters_of(one)) for one in message.outputs]
    request = InferenceRequest([], message.id, wanted or None, parameters_of(message))
    check_parameters("the request", request.parameters, _REQUEST_CHECKS)
    for one in wanted:
        check_parameters(f"output {one.name!r}", one.parameters, _OUTPUT_CHECKS)
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise RefusedRequest(
            400, f"raw_input_contents: expected one entry for each of {len(message.inputs)} inputs, got {len(raw)}"
        )
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for number, tensor in enumerate(message.inputs):
        if tensor.name in arrays:
            raise RefusedRequest(400, f"input {tensor.name!r}: expected once, got twice")
        arrays[tensor.name] = _array_of(tensor, raw[number] if raw else None)
    return request, arrays


def encode_message(answer: InferenceAnswer, request: InferenceRequest, *, is_raw: bool) -> bytes:
    """Return the bytes of a `ModelInferResponse` with the outputs that the request wants.

    is_raw  whether values are sent as bytes, which is also the form of FP16 and BF16
    """
    names = [one.name for one in request.outputs] if request.outputs else list(answer.outputs)
    arrays = {name: answer.outputs[name] for name in names}
    datatypes = {name: str(datatype_of(array.dtype)) for name, array in arrays.items()}
    is_raw = is_raw or not _CONTENTS.keys() >= set(datatypes.values())
    message = MESSAGES["ModelInferResponse"](
        model_name=answer.model_name, model_version=answer.model_version, id=request.id
    )
    for name, array in arrays.items():
        output = message.outputs.add(name=name, datatype=datatypes[name], shape=array.shape)
        if is_raw:
            message.raw_output_contents.append(array.tobytes())
        else:
            values, flat = getattr(output.contents, _CONTENTS[datatypes[name]]), array.reshape(-1)
            for start in range(0, flat.size, _PIECE_NUMBERS):
                values.extend(flat[start : start + _PIECE_NUMBERS].tolist())
    encoded: bytes = message.SerializeToString()
    return encoded


def _array_of(tensor: Any, raw: bytes | None) -> np.ndarray[Any, Any]:
    subject, shape = f"input {tensor.name!r}", list(tensor.shape)
    dtype = dtype_of(subject, tensor.datatype, shape)
    check_parameters(subject, parameters_of(tensor), {})
    given = [field.name for field, _ in tensor.contents.ListFields()]
    if raw is None:
        return _from_contents(subject, tensor, given, dtype)
    if given:
        raise RefusedRequest(400, f"{subject}: expected raw_input_contents or contents, got both")
    if (due := bytes_of(dtype, shape)) not in (None, len(raw)):
        raise RefusedRequest(400, f"{subject}: expected {due} bytes for {tensor.datatype}{shape}, got {len(raw)}")
    return array_of_bytes(subject, raw, dtype, shape)


def _from_contents(subject: str, tensor: Any, given: list[str], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if (due := _CONTENTS.get(tensor.datatype)) is None:
        raise RefusedRequest(400, f"{subject}: expected raw_input_contents, the only form of {tensor.datatype}")
    if set(given) - {due}:
        raise RefusedRequest(400, f"{subject}: expected {due} for {tensor.datatype}, got {', '.join(given)}")
    values, shape = getattr(tensor.contents, due), list(tensor.shape)
    if len(values) != math.prod(shape):
        raise RefusedRequest(
            400, f"{subject}: expected {math.prod(shape)} values for its shape {shape}, got {len(values)}"
        )
    array = np.empty(len(values), dtype)
    try:
        for start in range(0, len(values), _PIECE_NUMBERS):
            array[start : start + _PIECE_NUMBERS] = np.array(values[start : start + _PIECE_NUMBERS], dtype)
    except OverflowError:
        raise RefusedRequest(
            400, f"{subject}: expected numbers that {tensor.datatype} can hold, got a larger one"
        ) from None
    return array.reshape(shape)
