"""Storage for the durable state of a coordinator: in memory, or in an SQLite file.

Invariants:
- `write` is all or nothing: after a crash at any point the file holds the changes of the first calls, each complete;
- when `write` has returned, no crash of the process or the machine loses its changes;
- at most one process has a file open;
- a file whose bytes changed is refused, or holds the changes of the first calls: SQLite checks its pages, its log has
  checksums, and each record has one, since SQLite's checks do not see a flipped bit of a value.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from dflow.distributed.coordinator.durable_records import Change, apply_changes
from dflow.tracing.errors import ConfigError

#: Version of the tables in the file; a file of another version is refused.
FORMAT = 4


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
    raises  ConfigError when another process has it open, it cannot be written, it is damaged, or it is not a file of
            this format
    """

    def __init__(self, path: Path, *, wait_s: float = 0.0) -> None:
        self._path = path
        self._connect(wait_s)

    def _connect(self, wait_s: float) -> None:
        path = self._path
        try:
            self._database = sqlite3.connect(path, timeout=wait_s, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise ConfigError(
                f"the coordinator's state cannot be kept in {path}: {error}; name another file"
            ) from error
        try:
            self._open()
            self._check()
            #: Identity of the file: another one may come in its place.
            self._file = _identity(path)
        except sqlite3.OperationalError as error:
            self._database.close()
            is_used = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            remedy = "end the other coordinator that uses it" if is_used else "make room and give leave to write there"
            raise ConfigError(
                f"the coordinator's state cannot be kept in {path}: {error}; {remedy}, or name another file"
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
        if not tables:  # a file of before is opened without a write, which a full disk would refuse
            database.execute(
                "CREATE TABLE records (key TEXT PRIMARY KEY, value BLOB NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID"
            )
            database.execute(f"PRAGMA user_version = {FORMAT}")
        database.execute("COMMIT")

    def _check(self) -> None:
        """Raise ConfigError unless the file is whole and has the records that were written."""
        [(found,)] = self._database.execute("PRAGMA quick_check(1)").fetchall()
        if found != "ok":
            raise self._damaged(found)
        for key, value, sum in self._database.execute("SELECT key, value, sum FROM records"):
            if not isinstance(key, str) or not isinstance(value, bytes) or _sum(key, value) != sum:
                raise self._damaged("records with other checksums")

    def _damaged(self, found: str) -> ConfigError:
        return ConfigError(
            f"the coordinator's state {self._path}: expected the records that were written, got: {found}; put a copy "
            "of it there, or name another file to start with an empty state"
        )

    def load(self) -> Mapping[str, bytes]:
        """Return all records."""
        return dict(self._database.execute("SELECT key, value FROM records").fetchall())

    def write(self, changes: Iterable[Change]) -> None:
        """Apply the changes in one transaction.

        raises  OSError, and changes nothing, if the file cannot be written, or was removed or replaced
        """
        database = self._database
        try:
            if _identity(self._path) != self._file:
                raise OSError(f"the coordinator's state {self._path} was removed, or replaced by another file")
            database.execute("BEGIN IMMEDIATE")
            for change in changes:
                if change.value is None:
                    database.execute("DELETE FROM records WHERE key = ?", (change.key,))
                else:
                    row = (change.key, change.value, _sum(change.key, change.value))
                    database.execute("REPLACE INTO records VALUES (?, ?, ?)", row)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise OSError(f"the coordinator's state could not be written to {self._path}: {error}") from error

    def renew(self, rows: Mapping[str, bytes]) -> None:
        """Open the file again, or make it again if it is gone, and replace all its records by `rows`.

        raises  OSError, and the records are as they were, when it cannot be opened or written
        """
        self.close()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connect(0.0)
        except ConfigError as error:
            raise OSError(str(error)) from error
        gone = (Change(key, None) for key in self.load() if key not in rows)
        self.write([*gone, *(Change(key, value) for key, value in rows.items())])

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a file; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))


CoordinatorStore = MemoryStore | SqliteStore
