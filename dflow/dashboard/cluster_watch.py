"""A thread that looks at a cluster once a second, for all pages together.

It asks no more than `dflow status --watch` does, whatever the number of pages. A cluster that answers slowly is asked
less often: the thread waits at least as long as the last look took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dflow.dashboard.dashboard_record import DashboardRecord, PageUpdate
from dflow.dashboard.looks import LOOK_S, look
from dflow.dashboard.observing import ClusterObserver
from dflow.distributed.transport.base import Transport
from dflow.tracing.errors import DflowError

#: Threads that ask tasks for their states.
_THREADS = 16


class ClusterWatch:
    """Watches a cluster from construction until `close`; thread-safe.

    on_updates  called with the updates of each look, and with the last state while a look takes longer than `every_s`,
                from threads of this watch
    every_s     time between two looks, in s
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: str,
        on_updates: Callable[[Sequence[PageUpdate]], None],
        *,
        every_s: float = LOOK_S,
    ) -> None:
        self._transport, self._coordinator = transport, coordinator
        self._on_updates, self._every_s = on_updates, every_s
        self._record = DashboardRecord(coordinator)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dflow dashboard watch", daemon=True)
        self._is_told = False
        self._thread.start()
        self._repeating = threading.Thread(target=self._repeat, name="dflow dashboard repeats", daemon=True)
        self._repeating.start()

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._record.state()

    def history(self, names: Collection[str]) -> dict[str, Any]:
        with self._lock:
            return self._record.history.json(names)

    def events(self, since: int) -> dict[str, Any]:
        with self._lock:
            return self._record.events(since)

    def close(self) -> None:
        """Stop, after the present look."""
        self._closing.set()
        self._thread.join()
        self._repeating.join()

    def _repeat(self) -> None:
        """Tell the last state again while a look takes long: for a silent page, the connection is lost."""
        while not self._closing.wait(self._every_s):
            is_told, self._is_told = self._is_told, False
            if not is_told:
                self._on_updates([("state", self.state())])

    def _watch(self) -> None:
        observer: ClusterObserver | None = None
        with ThreadPoolExecutor(_THREADS, "dflow dashboard look") as pool:
            while not self._closing.is_set():
                began_s = time.monotonic()
                try:
                    if observer is None:
                        observer = ClusterObserver(self._transport, self._coordinator)
                    found = look(observer, pool)
                    told = observer.events(self._record.seen_event, self._record.seen_start)
                except (DflowError, OSError) as error:
                    if observer is not None:
                        observer.close()
                        observer = None
                    with self._lock:
                        updates = self._record.failed(str(error), now_s=time.monotonic())
                else:
                    with self._lock:
                        updates = self._record.seen(found, told, wall_s=time.time())
                self._is_told = True
                self._on_updates(updates)
                took_s = time.monotonic() - began_s
                self._closing.wait(max(self._every_s - took_s, min(took_s, self._every_s)))
            if observer is not None:
                observer.close()
