"""The members and parameters of requests of the Open Inference Protocol v2 and of Triton's repository extension.

Invariant: each member and each parameter of a request is honoured, or the request is refused. A server that ignored a
misspelt or unsupported parameter would return an answer that the client did not ask for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from dflow.serving.json_errors import members_fault
from dflow.tracing.near_names import did_you_mean


class RefusedRequest(Exception):
    """A request that is answered by an HTTP status and a JSON object with the field `error`."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.headers = status, dict(headers or {})


class SentTensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor as a request has it: `data` is JSON, or empty if the bytes follow."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class WantedOutput(msgspec.Struct, forbid_unknown_fields=True):
    """An output that a request names."""

    name: str
    parameters: dict[str, Any] = {}


class InferenceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a request."""

    inputs: list[SentTensor]
    id: str = ""
    outputs: list[WantedOutput] | None = None
    parameters: dict[str, Any] = {}


class IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a request for the repository's index; with `ready`, of the models that are served."""

    ready: bool = False


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a request to look for a newer version."""

    parameters: dict[str, Any] = {}


class _Named(msgspec.Struct):
    name: str = ""


class _Names(msgspec.Struct):
    """The names of a request alone: all else of its JSON is skipped, which costs no memory."""

    inputs: list[_Named] = []
    outputs: list[_Named] | None = None


#: The check of a parameter, and what is expected of it.
Checks = Mapping[str, tuple[Callable[[Any], bool], str]]
_BOOL = (lambda value: type(value) is bool), "true or false"
_SIZE = (lambda value: type(value) is int and value >= 0), "a whole number from 0"
REQUEST_CHECKS: Checks = {
    "timeout": (_SIZE[0], "a whole number of microseconds"),
    "binary_data_output": _BOOL,
}
INPUT_CHECKS: Checks = {"binary_data_size": _SIZE}
OUTPUT_CHECKS: Checks = {"binary_data": _BOOL, "classification": ((lambda value: value in (0, None)), "0")}
#: Names that the protocol or its extensions have, and this server does not offer.
_NOT_OFFERED = {
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), "sequences are"),
    **dict.fromkeys(("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"), "shared memory is"),
    "classification": "the classification extension is",
    "priority": "priorities are",
    "triton_enable_empty_final_response": "streams of answers are",
    "content_type": "conversion by content type is",
    "headers": "parameters of headers are",
    "contents": "gRPC's form of tensors is",
    "config": "another configuration of a model is",
}
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.(inputs|outputs)\[(\d+)\]`)?", re.DOTALL)
Members = TypeVar("Members", bound=msgspec.Struct)


def decode_members(data: bytes | memoryview, kind: type[Members], subject: str = "the request") -> Members:
    """Return the JSON of a request. Raises RefusedRequest, which suggests the name of a misspelt member."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        found = _UNKNOWN.fullmatch(str(error))
        if found is None:
            raise RefusedRequest(400, _not_finite(data) or f"{subject}'s JSON: {members_fault(error)}") from None
        given, group, index = found.groups()
        if group is not None:
            kind_of, name = (SentTensor, WantedOutput)[group == "outputs"], _name_of(data, group, int(index))
            subject = f"{group[:-1]} {name!r}" if name else f"{group}[{index}]"
            raise _unknown(subject, "member", given, kind_of.__struct_fields__) from None
        raise _unknown(subject, "member", given, kind.__struct_fields__) from None


def check_parameters(subject: str, parameters: Mapping[str, Any], checks: Checks) -> None:
    """Raise RefusedRequest unless each parameter is in `checks` and passes."""
    for name, value in parameters.items():
        if name not in checks:
            raise _unknown(subject, "parameter", name, checks)
        is_right, expected = checks[name]
        if not is_right(value):
            remedy = f"; {_NOT_OFFERED[name]} not offered" if name in _NOT_OFFERED else ""
            raise RefusedRequest(400, f"{subject}: parameter {name!r}: expected {expected}, got {value!r:.100}{remedy}")


def _unknown(subject: str, what: str, given: str, known: Any) -> RefusedRequest:
    if given in _NOT_OFFERED:
        remedy = f"{_NOT_OFFERED[given]} not offered; leave it out"
    else:
        remedy = did_you_mean(given, known, f"the {what}s are {', '.join(known)}" if known else "leave it out")
    return RefusedRequest(400, f"{subject}: unknown {what} {given[:100]!r}; {remedy}")


def _not_finite(data: bytes | memoryview) -> str | None:
    """Return the refusal of a request whose JSON holds a NaN or infinity, as Python's `json` writes them."""
    if re.search(rb"NaN|Infinity", data) is None:
        return None
    try:
        inputs = json.loads(bytes(data))["inputs"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    for one in inputs if isinstance(inputs, list) else ():
        try:
            json.dumps(one, allow_nan=False)
        except ValueError:
            name = one.get("name") if isinstance(one, dict) else None
            return f"input {name!r}: NaN or infinity, which JSON cannot hold; send it as bytes, with binary_data_size"
    return None


def _name_of(data: bytes | memoryview, group: str, index: int) -> str:
    """Return the name of an input or output; empty if it has none, or if the JSON after it cannot be decoded."""
    try:
        named: list[_Named] = getattr(msgspec.json.decode(data, type=_Names), group)
    except msgspec.MsgspecError:
        return ""
    return named[index].name
