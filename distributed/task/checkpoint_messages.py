"""Messages to save, restore and evaluate the variables that a task holds."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Ok
from dflow.distributed.wire.messages.message import Message, Request
from dflow.lowering.files.narrowing import Narrowing
from dflow.tracing.rows.axis_slice import AxisSlice


class SavedVariable(msgspec.Struct, frozen=True):
    """A variable to write: its `key`, the `name` of its array, and its `path` within the folder.

    `narrowing`  what of it is written, in fewer bits; None for the value as it is
    """

    key: str
    name: str
    path: str
    narrowing: Narrowing | None = None


class VariablePart(msgspec.Struct, frozen=True):
    """A variable on a task that has the elements at `indices` of an array."""

    task: str
    key: str
    indices: AxisSlice


class DividedVariable(msgspec.Struct, frozen=True):
    """An array of `shape` to write, with its `parts` in several variables; `name`, `path` as in `SavedVariable`."""

    name: str
    path: str
    shape: tuple[int, ...]
    parts: tuple[VariablePart, ...]


class CaptureVariables(Request[Ok], frozen=True):
    """Take the values of variables at one moment and keep them until `EndCapture`.

    `number`  number of the capture, unique within `origin`; a second capture with it replaces the first
    """

    speaker = "origin"

    origin: str
    number: int
    keys: tuple[str, ...]


class SaveVariables(Request[Ok], frozen=True):
    """Write captured values into the folder of a save, which every task can access.

    `divided`  arrays that the task writes some chunks of; other tasks have captured the other parts
    """

    speaker = "origin"

    origin: str
    number: int
    folder: str
    variables: tuple[SavedVariable, ...]
    divided: tuple[DividedVariable, ...] = ()


class ReadPiece(Request[Arrays], frozen=True):
    """Read a part of a value that was captured for the save of another task; answered with the data to store.

    `bounds`  first index and end along each dimension
    """

    origin: str
    number: int
    key: str
    bounds: tuple[tuple[int, int], ...]


class EndCapture(Request[Ok], frozen=True):
    """Free captured values; or with `share_as`, let other tasks read them by that name.

    They replace an earlier capture of that name, and are kept until the task that captured them and all tasks that have
    read them have ended their use or left the cluster.
    """

    speaker = "origin"

    origin: str
    number: int
    share_as: str = ""


class CapturedArrays(Message, frozen=True):
    """The values of a shared capture, and which one it is; without `origin`, there is none of that name."""

    origin: str = ""
    number: int = 0
    arrays: tuple[ArrayInfo, ...] = ()


class ReadCapture(Request[CapturedArrays], frozen=True):
    """Read the values of `keys` from the capture shared under `name`, and keep it until `EndShare` or a leave.

    Answered without `origin` if there is no capture of that name.
    """

    speaker = "reader"

    reader: str
    name: str
    keys: tuple[str, ...]


class EndShare(Request[Ok], frozen=True):
    """End the reader's use of the capture shared under `name`; the end of its last use frees it."""

    speaker = "reader"

    reader: str
    name: str


class ReadCheckpoint(Request[Ok], frozen=True):
    """Read values from a checkpoint and keep them until `EndRestore`.

    `number`     number of the restore, unique within `origin`
    `id`         id of the checkpoint at `path`, which every task can access
    `variables`  variable keys by the names of the checkpoint's arrays
    `parts`      variables of the task that have parts of arrays, by the arrays' names
    `axes`       arrays that are transposed as they are read, each with the order of its stored dimensions
    """

    speaker = "origin"

    origin: str
    number: int
    path: str
    id: str
    variables: dict[str, str]
    parts: dict[str, tuple[VariablePart, ...]] = msgspec.field(default_factory=dict)
    axes: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)


class EndRestore(Request[Ok], frozen=True):
    """Set the variables to the values read for a restore, or with `is_set` false, discard the values."""

    speaker = "origin"

    origin: str
    number: int
    is_set: bool
