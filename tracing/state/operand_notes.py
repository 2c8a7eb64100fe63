"""A note on JAX's error for operands whose shapes do not fit: the name of the variable among them, and both types."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np

from dflow.tracing.ir.types import ArrayType
from dflow.tracing.names_of_values import variable_read
from dflow.tracing.source import Loc, at, caller, is_installed, is_user_frame

#: The beginnings of errors about the shapes of several operands.
_SHAPES = re.compile(r"dot_general requires|matmul|Size of label|Incompatible shapes|Einstein sum|\w+ got incompatible")
_PRODUCT = re.compile(r"dot_general requires contracting dimensions to have the same shape, got .(\d+),. and .(\d+),")


def note_operands(error: Exception, known: tuple[Any, Any] | None = None) -> None:
    """Add a note with the line, the variable and the other operand to an error about shapes that do not fit.

    known  the operands, if the caller has them
    """
    if not _SHAPES.match(str(error)) or any("the operands are" in note for note in getattr(error, "__notes__", ())):
        return
    if (operands := known or _operands(error)) is not None:
        error.add_note(f"{at(_line(error)).lstrip(chr(10))}\n  {_remedy(str(error), *operands)}")


def _line(error: Exception) -> Loc | None:
    """The user's line, and not one of an installed library that the user's line has called."""
    frames = [frame for frame in traceback.walk_tb(error.__traceback__) if _is_own(frame[0])]
    return Loc(frames[-1][0].f_code.co_filename, frames[-1][1]) if frames else caller()


def _is_own(frame: FrameType) -> bool:
    return is_user_frame(frame) and not is_installed(frame.f_code.co_filename)


def _operands(error: Exception) -> tuple[Any, Any] | None:
    """Return the two arrays in the innermost function of a library that has two, if one is of a variable."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if _is_own(frame):
            return None
        found = list({id(one): one for one in _arrays(frame.f_locals.values())}.values())
        if len(found) == 2 and any(map(_name, found)):
            return found[0], found[1]
    return None


def _arrays(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _arrays(value)
        elif isinstance(value, jax.Array | np.ndarray | np.generic):
            yield value


def _name(operand: Any) -> str | None:
    name: str | None = operand.name if hasattr(operand, "handle") else variable_read(operand)
    return name


def _remedy(text: str, *operands: Any) -> str:
    shown, product = " and ".join(map(_shown, operands)), _PRODUCT.match(text)
    if product is None:
        return f"the operands are {shown}: give them shapes that fit"
    position = next(position for position, one in enumerate(operands) if _name(one))
    own, others = (product[2], product[1]) if position else (product[1], product[2])
    return f"the operands are {shown}: give {own} features to {_name(operands[position])!r}, or make it for {others}"


def _shown(operand: Any) -> str:
    type, name = str(ArrayType(operand.dtype, tuple(operand.shape))), _name(operand)
    return type if name is None else f"variable {name!r} of {type}"
