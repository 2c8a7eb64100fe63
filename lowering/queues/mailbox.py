"""Items handled one after another, on the threads that post them.

Why: a state machine takes one event at a time, also when handling one causes the next, or several threads have events
for it; and passing a short callback to another thread costs more than the callback. Invariants: items are handled in
the order of their posting, none within the handling of another; an error of one does not keep the others.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """A queue of items for `handle`, which takes one or more from the left of the queue it is given; thread-safe."""

    def __init__(self, handle: Callable[[deque[Item]], object]) -> None:
        self._handle = handle
        self._items: deque[Item] = deque()
        self._is_handling = False
        #: Held while items are handled; re-entrant. The owner holds it to see its state between two items.
        self.lock = threading.RLock()

    def post(self, item: Item) -> None:
        """Handle the item before this returns; one posted while this thread handles another, after that one."""
        self._items.append(item)
        with self.lock:
            if self._is_handling:
                return
            self._is_handling = True
            try:
                self._handle_all()
            finally:
                self._is_handling = False

    def _handle_all(self) -> None:
        """Handle all items, even if one raises; then raise its error."""
        try:
            while self._items:
                self._handle(self._items)
        except BaseException:
            self._handle_all()
            raise
