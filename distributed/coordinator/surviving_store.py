"""A store that outlives failures of its disk: it keeps changes that cannot be written, and retries.

Why: a disk that is full, read-only or gone need not end training. Until the disk takes writes again no snapshot is
complete, and the kept changes are lost if the coordinator ends; its clients detect that (`state_marks`).
Invariant: while nothing is `pending`, all changes are in the store.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

from dflow.distributed.coordinator.coordinator_store import CoordinatorStore, SqliteStore
from dflow.distributed.coordinator.durable_records import Change, apply_changes

LOGGER = logging.getLogger("dflow")

#: Time between two attempts to write after one that failed, in s.
RETRY_S = 1.0


class SurvivingStore:
    """Writes to `store`, and keeps changes that it cannot write for a later attempt; not thread-safe."""

    def __init__(self, store: CoordinatorStore) -> None:
        self._store = store
        #: Closes the store.
        self.close = store.close
        self._rows = dict(store.load())
        #: Changes that are not written, by key.
        self.pending: dict[str, Change] = {}
        self._failed_s, self._retry_s = math.nan, -math.inf

    def load(self) -> Mapping[str, bytes]:
        """Return all records, including unwritten changes."""
        return dict(self._rows)

    def write(self, changes: Iterable[Change], at_s: float) -> bool:
        """Write the changes, with earlier ones that could not be written; return whether all are written.

        After a failure, which is logged, it only keeps changes until `RETRY_S` later.
        """
        changes = [*changes]
        apply_changes(self._rows, changes)
        self.pending.update((change.key, change) for change in changes)
        if self.pending and at_s >= self._retry_s:
            self._try(at_s)
        return not self.pending

    def _try(self, at_s: float) -> None:
        is_again = not math.isnan(self._failed_s)
        try:
            if is_again and isinstance(self._store, SqliteStore):
                self._store.renew(self._rows)
            else:
                self._store.write(self.pending.values())
        except OSError as error:
            self._retry_s = at_s + RETRY_S
            if not is_again:
                self._failed_s = at_s
                LOGGER.warning(
                    "%s; steps go on, no snapshot is made, and a coordinator that is started again now would lack what "
                    "has changed since; it is tried again each %g s: make room, or give leave to write",
                    *(error, RETRY_S),
                )
            return
        self.pending.clear()
        if is_again:
            LOGGER.warning("the coordinator's state is written again, after %.0f s", at_s - self._failed_s)
        self._failed_s, self._retry_s = math.nan, -math.inf
