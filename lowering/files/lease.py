"""A lease: an object that shows whether the process that made it still runs, as `OwnerLock` does in a folder.

The owner renews it by conditional writes. Another process takes it over only after it has seen no renewal for as long
as the lease says, by its own clock: clocks of two machines are never compared. An owner that was paused for longer
finds the lease in other hands at its next renewal. So the owner renews it before it does what another one must not.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time

import msgspec

from dflow.lowering.files.object_path import ObjectPath, StoredObject
from dflow.tracing.errors import CheckpointError

LOGGER = logging.getLogger("dflow")

#: Time without a renewal after which a lease is free, and time between two renewals, in s.
LEASE_S = 20.0
RENEWAL_S = 4.0
#: Longest lease that another process may state, in s.
_LONGEST_S = 600.0
#: Number of looks at another process's lease while it would run out.
_LOOKS = 40


class _LeaseContent(msgspec.Struct, frozen=True):
    """What the object says: its owner, or an empty text after the release, and a number that each renewal changes."""

    owner: str
    token: str
    renewals: int
    lease_s: float


class Lease:
    """The lease of `file`, which this process holds and a thread renews, until `release`."""

    def __init__(self, file: ObjectPath, seen: StoredObject, content: _LeaseContent) -> None:
        self._file, self._seen, self._content = file, seen, content
        self._lock = threading.Lock()
        self._ends = threading.Event()
        #: The process that has taken the lease over, once it is known.
        self._other: str | None = None
        self._thread = threading.Thread(target=self._renew_often, name="dflow lease", daemon=True)
        self._thread.start()

    @staticmethod
    def take(file: ObjectPath, owner: str) -> Lease | str:
        """Take the lease for `owner`, the name of this process; wait until that of a process that ended runs out.

        Return the name of its owner instead if that runs. Raises CheckpointError if the store refuses a request.
        """
        seen = _free(file)
        if isinstance(seen, str):
            return seen
        content = _LeaseContent(owner, secrets.token_hex(8), 0, LEASE_S)
        written = file.replace(seen, msgspec.json.encode(content))
        if written is None:
            return _owner(file.read())
        return Lease(file, written, content)

    def check(self) -> None:
        """Raise CheckpointError if another process is known to have taken the lease over."""
        if self._other is not None:
            raise CheckpointError(
                f"{self._file.parent}: expected only this process to write there, got {self._other} too, which took "
                f"over when this one had not renewed its lease for {LEASE_S:g} s",
                "end one of the two, or give them different folders",
            )

    def renew(self, answer_s: float | None = None) -> None:
        """Renew the lease; wait at most `answer_s` for the store, by default as for any request.

        Raises CheckpointError if another process has taken it over, or the store refuses it.
        """
        self.check()
        with self._lock:
            for _ in range(2):
                content = msgspec.structs.replace(self._content, renewals=self._content.renewals + 1)
                written = self._file.replace(self._seen, msgspec.json.encode(content), answer_s=answer_s)
                if written is not None:
                    self._seen, self._content = written, content
                    return
                # An earlier renewal may have been written although its answer was lost, or the object removed.
                self._seen = self._file.read()
                own = _parsed(self._seen) or self._content
                if own.token != self._content.token:
                    break
                self._content = own
            self._other = _owner(self._seen) or "another process"
        self.check()

    def release(self) -> None:
        """Free the lease; if the store refuses that, it runs out."""
        self._ends.set()
        self._thread.join(2 * RENEWAL_S)
        with self._lock:
            if self._other is None:
                free = msgspec.structs.replace(self._content, owner="")
                try:
                    self._file.replace(self._seen, msgspec.json.encode(free), answer_s=RENEWAL_S)
                except CheckpointError as error:
                    LOGGER.warning("%s is not released, and runs out in %g s: %s", self._file, LEASE_S, error)

    def _renew_often(self) -> None:
        while not self._ends.wait(RENEWAL_S):
            try:
                self.renew(RENEWAL_S)
            except CheckpointError as error:
                LOGGER.warning("%s is not renewed: %s", self._file, error)
                if self._other is not None:
                    return


def _free(file: ObjectPath) -> StoredObject | str:
    """Return a lease that is free: there is none, it was released, or it was not renewed for its time.

    Return the name of its owner as soon as that renews it.
    """
    seen = file.read()
    held = _parsed(seen)
    if held is None or not held.owner:
        return seen
    lease_s = min(max(held.lease_s, 0.0), _LONGEST_S)
    LOGGER.info("%s is held by %s; waiting up to %g s to see whether that still runs", file, held.owner, lease_s)
    until_s = time.monotonic() + lease_s
    while (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(left_s, lease_s / _LOOKS))
        found = file.read()
        if found.generation != seen.generation:
            return _owner(found) or found
    return seen


def _parsed(found: StoredObject) -> _LeaseContent | None:
    """Return what an object says; None if there is none, or not a lease."""
    try:
        return msgspec.json.decode(found.content or b"", type=_LeaseContent)
    except msgspec.MsgspecError:
        return None


def _owner(found: StoredObject) -> str:
    content = _parsed(found)
    return content.owner if content is not None else ""
