"""The requests that wait at a task, by the task that sent them.

Why: 64 workers send requests to a ps task, and some requests take minutes (see `threads`). With one limit for all,
the slow requests of one worker would delay those of the others. So there is a limit for each task.

Invariants: at most `MOST_OF_A_TASK` requests of a task run at the same time, each on a thread; later ones wait for them
and hold no thread. So the number of threads grows with the number of tasks, not with that of requests.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

LOGGER = logging.getLogger("dflow")

#: At most this many requests of a task run at the same time.
MOST_OF_A_TASK = 8

_Work = Callable[[], object]


@dataclass(eq=False)
class _Requests:
    """The requests of one task: number running, and the queued ones."""

    running: int = 0
    waiting: deque[_Work] = field(default_factory=deque)


class RequestQueues:
    """Runs requests on `threads`, an executor that starts each call immediately; thread-safe."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._tasks: dict[str, _Requests] = {}

    def submit(self, task: str, work: Callable[..., object], *args: Any) -> None:
        """Run `work(*args)`, a request of `task`, on a thread: now, or when another request of the task has ended.

        raises  RuntimeError if no thread can be started
        """
        call = partial(work, *args)
        with self._lock:
            requests = self._tasks.get(task) or _Requests()
            if requests.running == MOST_OF_A_TASK:
                requests.waiting.append(call)
                return
            # Under the lock, so that no request is queued behind one that gets no thread.
            self._threads.submit(self._run, task, requests, call)
            requests.running += 1
            self._tasks[task] = requests

    def close(self) -> None:
        """Drop the queued requests, without an answer."""
        with self._lock:
            for requests in self._tasks.values():
                requests.waiting.clear()

    def _run(self, task: str, requests: _Requests, first: _Work) -> None:
        """Run a request, and then queued ones of the task until there are none; log errors that they raise."""
        work: _Work | None = first
        del first  # it may have a large payload
        while work is not None:
            try:
                work()
            except BaseException:  # also SystemExit, which would end this thread alone
                LOGGER.exception("a request of %s failed after it was answered", task)
            work = None
            with self._lock:
                if requests.waiting:
                    work = requests.waiting.popleft()
                    continue
                requests.running -= 1
                if not requests.running:
                    del self._tasks[task]
