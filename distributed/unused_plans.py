"""The plans of functions that are gone, which their tasks need not keep.

Why: a function is collected on whatever thread and in the midst of whatever, so that its finalizer takes no lock and
sends nothing. It only notes the plans; the next function that registers its own has these released.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Protocol

from dflow.distributed.messages import ReleasePlan
from dflow.distributed.transport.base import Peer
from dflow.tracing.errors import DflowError


class Server(Protocol):
    """What is needed of the task."""

    name: str

    def release(self, handle: int) -> None:
        """Take one registration of a plan back."""
        ...

    def peer(self, task: str) -> Peer:
        """The connection to another task."""
        ...


class UnusedPlans:
    """Plans by task and handle, noted by finalizers."""

    def __init__(self) -> None:
        self._noted: deque[Mapping[str, int]] = deque()

    def release_after(self, step: object, handles: Mapping[str, int]) -> None:
        """Note the plans once `step` is gone."""
        weakref.finalize(step, self._noted.append, handles).atexit = False

    def release(self, server: Server, tasks: Collection[str]) -> None:
        """Have `server` and those of `tasks`, which are alive, let go of the noted plans."""
        while self._noted:
            for task, handle in self._noted.popleft().items():
                if task == server.name:
                    server.release(handle)
                elif task in tasks:
                    with contextlib.suppress(DflowError):  # the task is gone, and its plans with it
                        server.peer(task).notify(ReleasePlan(handle))
