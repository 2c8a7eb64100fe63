"""Texts about the JSON of a request that has another form than expected, made of the errors of its decoder."""

from __future__ import annotations

import re

#: The kinds expected, the kind that came, and its position, such as `inputs[0].shape`, if it is not the whole.
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


def members_fault(error: Exception) -> str:
    """Return what is wrong with JSON that could not be decoded as an object with known members."""
    if (kind := _KIND.fullmatch(str(error))) is not None:
        kinds, got, position = kind.groups()
        expected = " or ".join(_EXPECTED.get(kind, kind) for kind in kinds.split(" | "))
        fault = f"expected {expected}, got {_GOT.get(got, got)}"
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
    if (kind := _KIND.fullmatch(str(error))) is not None:
        _, got, position = kind.groups()
        return _GOT.get(got, got) + (f" at data{position}" if is_whole and position else "")
    if (beyond := _BEYOND.search(str(error))) is not None:
        return beyond[1]
    if isinstance(error, OverflowError) or str(error).startswith("Number out of range"):
        return "a number beyond its range"
    return "lists of several lengths" if "inhomogeneous" in str(error) else str(error)
