"""Saves and restores of the variables that a task holds.

A save and a restore have a number, unique within the task `origin` that began them.
"""

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
    """Keep the present values of variables until `SaveVariables` or `EndSave`; the same save may capture again."""

    speaker = "origin"

    origin: str
    number: int
    keys: tuple[str, ...]


class SaveVariables(Request[Ok], frozen=True):
    """Write the captured values into the folder of a save, which every task can access."""

    speaker = "origin"

    origin: str
    number: int
    folder: str
    variables: tuple[SavedVariable, ...]


class EndSave(Request[Ok], frozen=True):
    """Free the captured values of a save that has failed."""

    speaker = "origin"

    origin: str
    number: int


class ReadCheckpoint(Request[Ok], frozen=True):
    """Read values from a checkpoint and keep them until `EndRestore`.

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
