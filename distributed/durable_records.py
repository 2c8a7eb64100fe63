"""What of a coordinator's state outlives its process: named records, and which of them an event has changed.

Why: the parts that decide (membership, ledger, elections, directory) say what has to last where they change it, and
know nothing of files; whoever carries out the commands writes the changes down before it answers.

Invariant: the changes of all `take_changes` so far, applied in order to nothing, are the records. A part that is made
from them answers as the one that wrote them would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from dflow.tracing.errors import InternalError

Record = TypeVar("Record", bound=msgspec.Struct)

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Change:
    """The record under `key` is `value` from now on, or is gone when that is None."""

    key: str
    value: bytes | None


class DurableRecords:
    """The records of one coordinator.

    `rows`  those that an earlier process of the same coordinator has left
    """

    def __init__(self, rows: Mapping[str, bytes] | None = None) -> None:
        self._rows = dict(rows or {})
        self._changed: dict[str, bytes | None] = {}

    def load(self, prefix: str, type: type[Record]) -> Iterator[tuple[str, Record]]:
        """Each record that was there from the start whose key begins with `prefix`, with the rest of the key, by key.

        raises  InternalError when it is of another form, as that of another version may be
        """
        for key in sorted(key for key in self._rows if key.startswith(prefix)):
            try:
                yield key.removeprefix(prefix), msgspec.msgpack.decode(self._rows[key], type=type)
            except msgspec.DecodeError as error:
                raise InternalError(
                    f"the coordinator's record {key!r} is not a {type.__name__} of this version of dflow: {error}; "
                    "go on with the version that wrote it, or begin with a new state"
                ) from error

    def put(self, key: str, record: msgspec.Struct) -> None:
        """Set or replace a record."""
        self._changed[key] = _ENCODER.encode(record)

    def drop(self, key: str) -> None:
        """Let go of a record, if it is there."""
        self._changed[key] = None

    @property
    def has_changed(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._changed)

    def take_changes(self) -> tuple[Change, ...]:
        """What has changed since the last call."""
        changes = tuple(Change(key, value) for key, value in self._changed.items())
        self._changed.clear()
        return changes


def apply_changes(rows: dict[str, bytes], changes: Iterable[Change]) -> None:
    """Bring `rows` to what they are after the changes."""
    for change in changes:
        if change.value is None:
            rows.pop(change.key, None)
        else:
            rows[change.key] = change.value
