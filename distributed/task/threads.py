"""Threads on demand, for work that may wait.

Why: work that waits for other work must not keep it from beginning, so each has a thread. A `ThreadPoolExecutor` of
many threads does not promise that: from Python 3.12 on it may count a thread as idle that has just begun to work, and
start none. So each thread here is an executor of one.

The work of a task that may block, with its longest duration, and its thread:

- Compiling the programs of `RegisterPlan` and `CreateVariables`: tens of seconds each, after at most 600 s for the
  `FairSemaphore`, which allows at most one per core. A request's thread.
- Waiting for a program that another request compiles, or a variable that it creates: 600 s. A request's thread.
- `SaveVariables`, `ReadCheckpoint`: as long as the file system takes, and until other tasks have answered
  `ReadPiece`, each at most `reach_timeout_s`. A request's thread.
- `ReadVariables`, `ReadPiece`, `WriteVariable`, `CaptureVariables`, `ReadCapture`, `EndRestore`: until the values are
  computed, and at most 600 s until a program that uses them is dispatched. A request's thread. Other requests wait only
  for locks.
- Batches that a task serves to others: as long as the user's code reads them. A thread, at most 8 for each sender,
  whose other requests do not wait for them.
- Items of plans with Python callbacks, which may wait forever, and with copies or loops whose length is computed: a
  thread for each item.
- Items that use a variable which a program has, until that is dispatched: a thread for each item.
- The first run of a plan with programs: JAX compiles one again if its variables lie elsewhere than expected, such as on
  several devices. A thread for each item. Other programs that use these variables wait meanwhile.
- Connecting a task that is dead: `connect_timeout_s`, or `reach_timeout_s` if it may be paused. A thread for each task
  that plans send to, and for each step and request of a `StepAggregator`.
- Answering a task that does not read: until it has taken no byte for 60 s (`Limits.stall_timeout_s`). The thread of the
  work that is answered; reader threads never wait for room to send.
- Waiting until values that a plan sends are computed. The plan's thread; a reader thread first hands over its other
  connections (`reactor`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class OnDemandThreads(Executor):
    """Begins each submitted call immediately, on an idle thread or a new one. A process waits for them when it exits.

    There are as many threads as there were calls at the same time. `name` is the beginning of their names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: list[ThreadPoolExecutor] = []
        self._idle: list[ThreadPoolExecutor] = []
        self._is_shut = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """See `Executor.submit`; raises RuntimeError also if the system starts no more threads."""
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            thread = self._idle.pop() if self._idle else self._new()
        try:
            future = thread.submit(fn, *args, **kwargs)
        except RuntimeError:
            with self._lock:
                self._threads.remove(thread)
            raise
        future.add_done_callback(lambda _: self._idle.append(thread))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor.shutdown`."""
        with self._lock:
            self._is_shut = True
            threads = list(self._threads)
        for thread in threads:
            thread.shutdown(wait, cancel_futures=cancel_futures)

    def _new(self) -> ThreadPoolExecutor:
        thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        self._threads.append(thread)
        return thread
