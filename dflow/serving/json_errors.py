"""Texts about the JSON of a request that has another form than expected, made of the errors of its decoder."""

from __future__ import annotations

import re
from typing import NamedTuple

_KIND = re.compile(r"Expected `(.+?)`, got `(\w+)`(?: - at `\$\.?(.+)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`(?: - at `\$\.?(.+)`)?", re.DOTALL)
#: NumPy's text for a number that an integer dtype of at most 32 bits cannot hold.
_BEYOND = re.compile(r"Python integer (-?\d+) out of bounds")
_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_GOT = {**_EXPECTED, "int": "a number", "float": "a float"}


class WrongKind(NamedTuple):
    """A value of another kind than expected, in words, and its position: `inputs[0].shape`, or empty."""

    expected: str
    got: str
    position: str


def wrong_kind(error: Exception) -> WrongKind | None:
    """Return the value that an error of the decoder is about, if it is one of a wrong kind."""
    if (found := _KIND.fullmatch(str(error))) is None:
        return None
    kinds, got, position = found.groups()
    expected = " or ".join(_EXPECTED.get(kind, kind) for kind in kinds.split(" | "))
    return WrongKind(expected, _GOT.get(got, got), position or "")


def members_fault(error: Exception) -> str:
    """Return what is wrong with JSON that could not be decoded as an object with known members."""
    if (kind := wrong_kind(error)) is not None:
        fault, position = f"expected {kind.expected}, got {kind.got}", kind.position
    elif (missing := _MISSING.fullmatch(str(error))) is not None:
        fault, position = f"expected the member {missing[1]!r}, got none", missing[2]
    elif str(error) == "Input data was truncated":
        return "expected an object, got none, or not the whole"
    else:
        return str(error)
    return f"{position}: {fault}" if position else fault


def list_fault(error: Exception, *, is_whole: bool) -> str:
    """Return what a list of numbers has instead of those expected.

    is_whole  whether the list was decoded in one piece, so that the position in the error is one in `data`
    """
    if (kind := wrong_kind(error)) is not None:
        return kind.got + (f" at data{kind.position}" if is_whole and kind.position else "")
    if (beyond := _BEYOND.search(str(error))) is not None:
        return beyond[1]
    if isinstance(error, OverflowError) or str(error).startswith("Number out of range"):
        return "a number beyond its range"
    return "lists of several lengths" if "inhomogeneous" in str(error) else str(error)
