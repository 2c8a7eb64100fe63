"""Storage for the durable state of a coordinator: in memory, or in an SQLite file.

Invariants:
- `write` is all or nothing: after a crash at any point the file holds the changes of the first calls, each complete;
- when `write` has returned, no crash of the process or the machine loses its changes;
- at most one process has a file open;
- a file whose bytes changed is refused, or holds the changes of the first calls: SQLite's log has checksums, and one
  record is the total of the others' checksums.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from dflow.distributed.coordinator.durable_records import Change, apply_changes
from dflow.tracing.errors import ConfigError

#: Version of the tables in the file; a file of another version is refused.
FORMAT = 3
#: Key of the record with the total of all others' checksums.
_TOTAL = "store/total"


class MemoryStore:
    """Records that are lost with this object."""

    def __init__(self) -> None:
        self._rows: dict[str, bytes] = {}

    def load(self) -> Mapping[str, bytes]:
        """Return all records."""
        return dict(self._rows)

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes."""
        apply_changes(self._rows, changes)

    def close(self) -> None:
        """Do nothing: the records stay."""


class SqliteStore:
    """Records in the SQLite file at `path`, created if it does not exist.

    wait_s  longest wait for another process that has it open, in s
    raises  ConfigError when another process has it open, it is damaged, or it is not a file of this format
    """

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        #: The checksum of each record, by key, and their total.
        self._sums: dict[str, int] = {}
        self._total = 0
        try:
            self._database = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the coordinator's state cannot be kept in {path}: {error}; name another file"
            ) from error
        try:
            self._open()
            self._check()
        except sqlite3.OperationalError as error:
            self._database.close()
            raise ConfigError(
                f"the coordinator's state cannot be kept in {path}: {error}; end the other coordinator that uses it, "
                "or name another file"
            ) from error
        except sqlite3.Error as error:
            self._database.close()
            raise self._damaged(str(error)) from error
        except ConfigError:
            self._database.close()
            raise

    def _open(self) -> None:
        database = self._database
        # Exclusive before the first use of the write-ahead log, which then needs no shared memory.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN IMMEDIATE")
        [(version,)] = database.execute("PRAGMA user_version").fetchall()
        [(tables,)] = database.execute("SELECT count(*) FROM sqlite_master").fetchall()
        if version != (FORMAT if tables else 0):
            raise ConfigError(
                f"{self._path} is no coordinator's state of this version of dflow: its format is {version}, and "
                f"{FORMAT} is needed; name another file"
            )
        database.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID")
        database.execute(f"PRAGMA user_version = {FORMAT}")
        database.execute("COMMIT")

    def _check(self) -> None:
        """Raise ConfigError unless the file is whole and has the records that were written."""
        [(found,)] = self._database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise self._damaged(found)
        rows = self._database.execute("SELECT key, value FROM records").fetchall()
        if not all(isinstance(key, str) and isinstance(value, bytes) for key, value in rows):
            raise self._damaged("records of other types")
        self._sums = {key: _sum(key, value) for key, value in rows if key != _TOTAL}
        self._total = sum(self._sums.values())
        if rows and dict(rows).get(_TOTAL) != self._encoded_total():
            raise self._damaged("records with other checksums")

    def _damaged(self, found: str) -> ConfigError:
        return ConfigError(
            f"the coordinator's state {self._path}: expected the records that were written, got: {found}; put a copy "
            "of it there, or name another file to start with an empty state"
        )

    def _encoded_total(self) -> bytes:
        return (self._total % (1 << 64)).to_bytes(8, "little")

    def load(self) -> Mapping[str, bytes]:
        """Return all records."""
        rows = dict(self._database.execute("SELECT key, value FROM records").fetchall())
        rows.pop(_TOTAL, None)
        return rows

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes in one transaction; raises OSError when the file cannot be written, which ends its use."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for change in changes:
                self._total -= self._sums.pop(change.key, 0)
                if change.value is None:
                    self._database.execute("DELETE FROM records WHERE key = ?", (change.key,))
                else:
                    self._sums[change.key] = added = _sum(change.key, change.value)
                    self._total += added
                    self._database.execute("REPLACE INTO records VALUES (?, ?)", (change.key, change.value))
            self._database.execute("REPLACE INTO records VALUES (?, ?)", (_TOTAL, self._encoded_total()))
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            raise OSError(f"the coordinator's state could not be written to {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _sum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))


CoordinatorStore = MemoryStore | SqliteStore
