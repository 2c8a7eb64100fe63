"""The role of a process in the checkpoints of a run, by where the variables are.

- `Alone`: the process restores and saves all variables.
- `OnTasks`: the variables are on tasks. Worker 0 restores and saves them; the other workers wait until it has restored.
- `InGroup`: each process of a group has variables of its own. All restore at the same time. Rank 0 saves what every
  process has whole, and each process its parts.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dflow.distributed.collectives.process_group import ProcessGroup, current_group
from dflow.distributed.snapshots.resumption import PROGRESS
from dflow.lowering.files.object_path import Location
from dflow.state_backends import by_backend
from dflow.tracing.errors import CheckpointError, DeadlineExceeded
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import agreed_steps, group_of, restored_together
from dflow.training.named_arrays import NamedArray, variables_of

#: Time between two looks at the number of the next step, in s.
_LOOK_S = 0.05


class Alone:
    """The process has all variables. The other roles differ from it where they say so."""

    #: Whether it restores first, deletes old checkpoints, and keeps the record of the folder.
    is_saver = True
    #: Whether all processes save at the same steps, each its own parts.
    is_together = False
    #: Whether worker 0 saves for the other workers.
    is_shared = False
    #: Whether variables that are saved live in this process.
    has_own = True

    def next_step(self) -> int | None:
        """Return the next step of the run as the state on the tasks has it; None if there is none."""
        return None

    def set_next_step(self, step: int) -> None:
        """Set the next step of the run in the state on the tasks."""

    def awaited_step(self, restored: Callable[[], int], timeout_s: float) -> int:
        """Return the next step, for a process that is no saver. `restored` restores its variables and returns it."""
        return restored()

    def steps_to_restore(self, folder: Location, steps: Sequence[int]) -> Sequence[int]:
        """Return the steps whose checkpoints may be restored, of those that this process sees in the folder."""
        return steps

    def restore(
        self, location: Location, named: Mapping[str, NamedArray], restore: Callable[[Callable[[], None]], None]
    ) -> None:
        """Restore by `restore`, on all processes or on none. It calls its argument before it sets a variable."""
        restore(lambda: None)


class OnTasks(Alone):
    """The variables are on tasks, and the next step in a variable beside `near`, so that it lives exactly as long.

    Worker 0 restores the state and then sets the number; the other workers wait for it. A worker that is started again
    finds the number set, and takes part in the state as it is. A snapshot of the state has the number too, so the
    number of a state that has returned to a snapshot is that of the snapshot's moment: one after the last step whose
    save had begun, while the steps done, which the coordinator's ledger has, may be more.
    """

    is_shared = True

    def __init__(self, near: Variable, folder: Location, *, is_saver: bool, has_own: bool = False) -> None:
        self._folder, self.is_saver, self.has_own = folder, is_saver, has_own
        # In an empty context: the user's scopes and containers are for the user's variables.
        self._next: Variable = contextvars.Context().run(
            lambda: Variable(lambda: jnp.int32(-1), name=f"{PROGRESS}{folder}", near=near, trainable=False)
        )

    def next_step(self) -> int | None:
        """Return the number; None until the state is restored."""
        found = int(self._next.read())
        return found if found >= 0 else None

    def set_next_step(self, step: int) -> None:
        """Set the number."""
        self._next.assign(jnp.int32(step))

    def awaited_step(self, restored: Callable[[], int], timeout_s: float) -> int:
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


class InGroup(Alone):
    """The variables are those of a process of a group; the group restores from the checkpoints that rank 0 sees."""

    def __init__(self, group: ProcessGroup, *, is_together: bool) -> None:
        self._group, self.is_saver, self.is_together = group, group.rank == 0, is_together

    def steps_to_restore(self, folder: Location, steps: Sequence[int]) -> Sequence[int]:
        """Return the steps that rank 0 sees. Raises CheckpointError if another process does not see them."""
        return agreed_steps(self._group, folder, steps)

    def restore(
        self, location: Location, named: Mapping[str, NamedArray], restore: Callable[[Callable[[], None]], None]
    ) -> None:
        """Restore on all processes, which compare the values, or on none."""
        restored_together(self._group, location, [*variables_of(named)], restore)


def role_of(named: Mapping[str, NamedArray], folder: Location, every: Any) -> Alone:
    """Return the role of this process. Raises CheckpointError unless processes that save together do so by steps."""
    homes = by_backend({name: entry.variables[0] for name, entry in named.items()})
    is_together = group_of(variables_of(named)) is not None
    if is_together and not isinstance(every, int):
        raise CheckpointError(
            f"every: expected a number of steps, at which all processes save together, got {every!r}",
            "give it like every=100",
        )
    # A group that is started again begins at its checkpoint, whatever its tasks have.
    if any(home.is_local for home in homes) and (group := current_group()) is not None:
        return InGroup(group, is_together=is_together)
    on_tasks = [next(iter(here.values())) for home, here in homes.items() if not home.is_local]
    if not on_tasks:
        return Alone()
    has_own = any(home.is_local for home in homes)
    return OnTasks(on_tasks[0], folder, is_saver=all(home.is_saver for home in homes), has_own=has_own)
