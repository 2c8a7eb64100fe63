"""Plans of functions that were garbage-collected, which tasks no longer need to keep.

Why: a finalizer runs on any thread, between any two instructions, so it must take no lock and send nothing. It
records the plans, and the next registration of a plan releases them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Protocol

from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.plans import ReleasePlan
from dflow.tracing.errors import DflowError


class PlanHolder(Protocol):
    """The part of a task server that is used here."""

    name: str

    def release(self, handle: int) -> None:
        """Undo one registration of a plan."""
        ...

    def peer(self, task: str) -> Peer:
        """Return the connection to another task."""
        ...


class UnusedPlans:
    """Plans by task and handle, recorded by finalizers."""

    def __init__(self) -> None:
        self._noted: deque[Mapping[str, int]] = deque()

    def release_after(self, step: object, handles: Mapping[str, int]) -> None:
        """Record the plans when `step` is garbage-collected."""
        weakref.finalize(step, self._noted.append, handles).atexit = False

    def release(self, server: PlanHolder, tasks: Collection[str]) -> None:
        """Release the recorded plans, on `server` and on its peers among the live `tasks`."""
        while self._noted:
            for task, handle in self._noted.popleft().items():
                if task == server.name:
                    server.release(handle)
                elif task in tasks:
                    with contextlib.suppress(DflowError):  # the task is gone, and its plans with it
                        server.peer(task).notify(ReleasePlan(handle))
