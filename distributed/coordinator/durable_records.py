"""The durable part of a coordinator's state: named records, and those changed by an event.

Why: the parts that decide (membership, ledger, elections, directory) put a record where they change what must outlive
the process, and know nothing of files. The shell writes the changes before it answers.

Invariant: the changes of all `take_changes` calls, applied in order to an empty dict, are the records. A part made from
them answers as the part that wrote them would.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from dflow.tracing.errors import InternalError

Record = TypeVar("Record")

#: Prefix of the keys of records that the coordinator's shell and its launcher keep beside those of the state.
SHELL = "shell/"
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Change:
    """The record under `key` becomes `value`, or is deleted when that is None."""

    key: str
    value: bytes | None


class DurableRecords:
    """The records of one coordinator; `load` reads the initial ones, without later changes.

    `rows`  records written by an earlier process of the same coordinator
    """

    def __init__(self, rows: Mapping[str, bytes] | None = None) -> None:
        self._rows = dict(rows or {})
        #: The records changed since the last `take_changes`, encoded; None for a deleted one.
        self.changed: dict[str, bytes | None] = {}

    def load(self, prefix: str, type: type[Record]) -> Iterator[tuple[str, Record]]:
        """Yield each initial record whose key begins with `prefix`, with the rest of its key, sorted by key.

        raises  InternalError when the record does not decode, such as one written by another version
        """
        for key in sorted(key for key in self._rows if key.startswith(prefix)):
            try:
                yield key.removeprefix(prefix), msgspec.msgpack.decode(self._rows[key], type=type)
            except msgspec.DecodeError as error:
                raise InternalError(
                    f"the coordinator's record {key!r} is not a {type.__name__} of this version of dflow: {error}; "
                    "go on with the version that wrote it, or begin with a new state"
                ) from error

    def load_one(self, key: str, default: Record) -> Record:
        """Return the initial record under `key`; `default` if there is none."""
        return next((record for _, record in self.load(key, type(default))), default)

    def put(self, key: str, record: msgspec.Struct | Mapping[str, Any]) -> None:
        """Set or replace a record; the next `take_changes` returns the change."""
        self.changed[key] = _ENCODER.encode(record)

    def drop(self, key: str) -> None:
        """Delete a record, if it exists; the next `take_changes` returns the change."""
        self.changed[key] = None

    def take_changes(self) -> tuple[Change, ...]:
        """Return the changes since the last call."""
        changes = tuple(Change(key, value) for key, value in self.changed.items())
        self.changed.clear()
        return changes


def replacing(rows: Iterable[str], new: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return the changes that replace the records with the keys `rows`, except the shell's, by `new`."""
    return {**dict.fromkeys(key for key in rows if not key.startswith(SHELL)), **new}


def apply_changes(rows: dict[str, bytes], changes: Iterable[Change]) -> None:
    """Apply the changes to `rows`."""
    for change in changes:
        if change.value is None:
            rows.pop(change.key, None)
        else:
            rows[change.key] = change.value
