"""The next step of a run on a cluster, in a variable beside the state, so that it lives exactly as long.

Worker 0 restores the state and then sets the number; the other workers wait for it. A worker that is started again
finds the number set, and takes part in the state as it is. A snapshot of the state has the number too, so the number
of a state that has returned to a snapshot is that of the snapshot's moment: one after the last step whose save had
begun, while the steps done, which the coordinator's ledger has, may be more.
"""

from __future__ import annotations

import contextvars
import time

import jax.numpy as jnp

from dflow.distributed.snapshots.resumption import PROGRESS
from dflow.lowering.files.object_path import Place
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.state.resources import Variable

#: Time between two looks at the number, in s.
_LOOK_S = 0.05


class SharedProgress:
    """The number of the next step of the run that saves into `folder`; `near` is one of its variables."""

    def __init__(self, near: Variable, folder: Place) -> None:
        self._folder = folder
        # In an empty context: the user's scopes and containers are for the user's variables.
        self._next: Variable = contextvars.Context().run(
            lambda: Variable(lambda: jnp.int32(-1), name=f"{PROGRESS}{folder}", near=near, trainable=False)
        )

    def next_step(self) -> int | None:
        """Return the number; None until the state is restored."""
        found = int(self._next.read())
        return found if found >= 0 else None

    def set(self, step: int) -> None:
        """Set the number of the next step."""
        self._next.assign(jnp.int32(step))

    def wait(self, timeout_s: float) -> int:
        """Return the number, after worker 0 has set it. Raises DeadlineExceeded."""
        until = time.monotonic() + timeout_s
        while (found := self.next_step()) is None:
            if time.monotonic() > until:
                raise DeadlineExceeded(
                    f"{self._folder}: expected worker 0 to restore the state within {timeout_s:g} s, and it has not",
                    "make the same CheckpointManager on worker 0",
                )
            time.sleep(_LOOK_S)
        return found
