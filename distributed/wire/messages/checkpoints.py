"""Saves and restores of the variables that a task holds."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.connection import Ok
from dflow.distributed.wire.messages.message import Request


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
