"""Saves, restores and evaluations of the variables that a task holds."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.connection import ArrayInfo, Ok
from dflow.distributed.wire.messages.message import Message, Request


class SavedVariable(msgspec.Struct, frozen=True):
    """A variable to write: its `key`, the `name` of its array, and its `place`, a path within the folder."""

    key: str
    name: str
    place: str


class CaptureVariables(Request[Ok], frozen=True):
    """Take the values of variables at one moment and keep them until `EndCapture`; a save may capture again.

    `number`  number of the capture, unique within `origin`
    """

    speaker = "origin"

    origin: str
    number: int
    keys: tuple[str, ...]


class SaveVariables(Request[Ok], frozen=True):
    """Write captured values into the folder of a save, which every task can access."""

    speaker = "origin"

    origin: str
    number: int
    folder: str
    variables: tuple[SavedVariable, ...]


class EndCapture(Request[Ok], frozen=True):
    """Free captured values."""

    speaker = "origin"

    origin: str
    number: int


class ShareCapture(Request[Ok], frozen=True):
    """Let other tasks read captured values by `name`, in place of an earlier capture of that name.

    The values are kept until the task that captured them and all tasks that have read them have ended their use or left
    the cluster.
    """

    speaker = "origin"

    origin: str
    number: int
    name: str


class CapturedArrays(Message, frozen=True):
    """The values of a shared capture, and which one it is; without `origin`, there is none of that name."""

    origin: str = ""
    number: int = 0
    arrays: tuple[ArrayInfo, ...] = ()


class ReadCapture(Request[CapturedArrays], frozen=True):
    """Read the values of `keys` from the capture shared under `name`."""

    speaker = "reader"

    reader: str
    name: str
    keys: tuple[str, ...]


class EndShare(Request[Ok], frozen=True):
    """The task needs the capture shared under `name` no longer."""

    speaker = "reader"

    reader: str
    name: str


class ReadCheckpoint(Request[Ok], frozen=True):
    """Read values from a checkpoint and keep them until `EndRestore`.

    `number`     number of the restore, unique within `origin`
    `id`         id of the checkpoint at `path`, which every task can access
    `variables`  variable keys by the names of the checkpoint's arrays
    """

    speaker = "origin"

    origin: str
    number: int
    path: str
    id: str
    variables: dict[str, str]


class EndRestore(Request[Ok], frozen=True):
    """Set the variables to the values read for a restore, or with `is_set` false, discard these."""

    speaker = "origin"

    origin: str
    number: int
    is_set: bool
