"""Where in the user's program an op was written. Our own frames, and those of JAX and Keras, are not the user's."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType

_PACKAGE = Path(__file__).resolve().parent.parent
#: Libraries that call the user's functions, or are called by them, in many frames of their own.
_LIBRARIES = [find_spec(name) or ModuleSpec(name, None) for name in ("jax", "keras")]
_HIDDEN = tuple(
    str(folder) + os.sep
    for folder in (
        *(_PACKAGE / name for name in ("dflow", "tracing", "lowering", "distributed")),
        Path(__file__).absolute().parent.parent,
        # Where it is, without importing it: the coordinator and the launcher do without.
        *(Path(folder) for library in _LIBRARIES for folder in library.submodule_search_locations or ()),
    )
)
# The commands that installed packages bring, such as `dflow` and `pytest`.
_COMMANDS = os.path.join(sys.prefix, "bin") + os.sep
_STANDARD_LIBRARY = str(Path(os.__file__).parent) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))


@dataclass(frozen=True, slots=True)
class Loc:
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The file's name without its folders, and the line: what a graph prints."""
        return f"{os.path.basename(self.file)}:{self.line}"


def is_user_file(file: str) -> bool:
    """Whether a frame of this file is one a user wants to read."""
    if file.startswith(_STANDARD_LIBRARY):
        return is_installed(file) and not file.startswith(_HIDDEN)
    return not file.startswith((*_HIDDEN, _COMMANDS, "<frozen"))


def is_user_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of the user, and not a method that `dataclasses`, attrs or others have generated."""
    code = frame.f_code
    is_of_ours = code.co_filename == "<string>" and frame.f_globals.get("__name__", "").startswith("dflow.")
    return not is_of_ours and not is_generated(code.co_filename, code.co_name) and is_user_file(code.co_filename)


def is_generated(file: str, function: str) -> bool:
    """Whether a function of this name and file is a special method without a file, as `dataclasses` makes them."""
    return file.startswith("<") and function.startswith("__") and function.endswith("__")


def is_installed(file: str) -> bool:
    """Whether a file is of an installed library."""
    return any(folder in file for folder in _INSTALLED)


def caller() -> Loc | None:
    """The innermost line of the running stack that is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_frame(frame):
            return Loc(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def raised_at(error: BaseException) -> Loc | None:
    """The innermost of the user's lines in an error's traceback."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [Loc(frame.f_code.co_filename, line) for frame, line in frames if is_user_frame(frame)]
    return lines[-1] if lines else None


def hide_own_frames(error: BaseException) -> None:
    """Remove the frames of JAX and dflow from the traceback of an error that the user's code or a refusal raised.

    As JAX does, not if `JAX_TRACEBACK_FILTERING=off`. For modules that do not import JAX.
    """
    frames = [*_tracebacks(error.__traceback__)]
    if not frames or os.environ.get("JAX_TRACEBACK_FILTERING") == "off":
        return
    kept = None
    for part in reversed(frames):
        if is_user_frame(part.tb_frame):
            kept = TracebackType(kept, part.tb_frame, part.tb_lasti, part.tb_lineno)
    error.__traceback__ = kept


def _tracebacks(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def as_code(name: str) -> str:
    """A variable's name if it is a Python identifier, else `variable`, for use in code that a message suggests."""
    return name if name.isidentifier() else "variable"


def at(loc: Loc | None) -> str:
    """A line `at file:line` to end a message with, or nothing when the line is not known."""
    return f"\n  at {loc}" if loc is not None else ""


def warn_at(loc: Loc | None, text: str, category: type[Warning]) -> None:
    """Warn at a line of the user: `stacklevel` cannot name it, since the number of JAX's frames in between varies."""
    if loc is None:
        warnings.warn(text, category, stacklevel=3)
    else:
        warnings.warn_explicit(text, category, loc.file, loc.line)
