"""The state on other tasks that this process has made and that may not be in a complete snapshot yet.

Why: when a task is lost, all tasks return to a snapshot, and state that was made after it is freed on all of them. Each
process that made such state makes it again, with the same initial values and on the same tasks, before its next
request. Invariant: state that a return has freed is listed here, unless the program of its process no longer has it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class _Made(NamedTuple):
    """State made in `epoch`, when `snapshots` was the number of complete ones; `make([item])` makes it again."""

    snapshots: int
    epoch: int
    item: Any
    make: Callable[[Sequence[Any]], None]


class UnsavedState:
    """The state that one process has made and that may be in no snapshot yet, by name; thread-safe."""

    def __init__(self) -> None:
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._maker: int | None = None
        self._made: dict[str, _Made] = {}
        #: Number of snapshots of whose completion this process knows.
        self._snapshots = 0
        #: Number of times that all tasks have returned to a snapshot.
        self.epoch = 0
        self._is_stale = False

    def note(self, name: str, epoch: int, item: Any, make: Callable[[Sequence[Any]], None]) -> None:
        """Record that this process has made the state `name`, so that `make_again` can.

        epoch  `epoch` before the state was placed
        make   makes such state from several items, in the order of these calls, and calls `note` for each again
        """
        with self._lock:
            self._made[name] = _Made(self._snapshots, epoch, item, make)
            self._is_stale = self._is_stale or epoch != self.epoch

    def forget(self, name: str) -> None:
        """Remove state that was freed: it is not made again."""
        with self._lock:
            self._made.pop(name, None)

    def snapshot_complete(self) -> None:
        """Count a complete snapshot, and drop the state that it has.

        Its capture began after this process had the notice of the snapshot before it, so it has all state that was made
        until that notice.
        """
        with self._lock:
            self._snapshots += 1
            self._made = {
                name: made
                for name, made in self._made.items()
                if made.snapshots > self._snapshots - 2 or made.epoch != self.epoch
            }

    def returned(self, epoch: int) -> None:
        """Record a return to a snapshot, which may have freed the state recorded here: `make_again` then makes it."""
        with self._lock:
            self.epoch, self._is_stale = epoch, bool(self._made)

    def make_again(self) -> None:
        """Make the recorded state that a return may have freed; wait for a thread that does. No effect in `make`."""
        if not self._is_stale or self._maker == threading.get_ident():
            return
        with self._making:
            self._maker = threading.get_ident()
            try:
                for make, items in self._freed().items():
                    make(items)
            finally:
                self._maker = None
        with self._lock:
            self._is_stale = any(made.epoch != self.epoch for made in self._made.values())

    def _freed(self) -> dict[Callable[[Sequence[Any]], None], list[Any]]:
        found: defaultdict[Callable[[Sequence[Any]], None], list[Any]] = defaultdict(list)
        with self._lock:
            for made in self._made.values():
                if made.epoch != self.epoch:
                    found[made.make].append(made.item)
        return found
