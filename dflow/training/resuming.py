"""The start of a `CheckpointManager`: it restores the newest checkpoint, from which the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import cast

from dflow.lowering.files.object_path import Location
from dflow.lowering.state_backend import StateBackend
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from dflow.training.checkpoint_folder import CheckpointFolder
from dflow.training.named_arrays import NamedArray
from dflow.training.restoring import restore_named
from dflow.training.save_roles import Alone

LOGGER = logging.getLogger("dflow")


def resume(folder: CheckpointFolder, named: Mapping[str, NamedArray], role: Alone, timeout_s: float) -> int:
    """Restore the newest checkpoint, or wait until worker 0 has; return the next step of the run."""
    if not role.is_saver:
        return role.awaited_step(lambda: _restore_newest(folder, named, role), timeout_s)
    first = role.next_step()
    if first is None:
        first = _restore_newest(folder, named, role)
        role.set_next_step(first)
    else:
        _set_undone_aside(folder, first)
        _restore_own(folder, named, role, first)
    return first


def _set_undone_aside(folder: CheckpointFolder, first: int) -> None:
    """Free the steps from `first` on: the tasks have returned to a snapshot, and the run comes to them again."""
    undone = [step for step in folder.steps() if step >= first]
    paths = [folder.files.set_aside(folder.location(step).name, "undone") for step in undone]
    if kept := [location for step, location in zip(undone, paths, strict=True) if location == folder.location(step)]:
        raise CheckpointError(
            f"{kept[0]}: expected to rename it, since its step is done again, got a refusal", "move it elsewhere"
        )
    if undone:
        LOGGER.warning(
            "%s: the tasks have the state of a snapshot, and the run goes on from it; manager.next_step is %d, since "
            "%s. Checkpoints of later steps, which are done again, are set aside: %s",
            *(folder.path, first),
            f"step {first - 1} is the last one saved before it" if first else "no step was saved before it",
            ", ".join(str(location).removeprefix(f"{folder.path}/") for location in paths),
        )


def _restore_own(folder: CheckpointFolder, named: Mapping[str, NamedArray], role: Alone, first: int) -> None:
    """Restore the variables of this process, which the tasks do not have, from the newest checkpoint before a step.

    Only where the tasks have theirs already.
    """
    own = [name for name, entry in named.items() if cast(StateBackend, entry.variables[0].home).is_local]
    for step in reversed([step for step in folder.steps() if step < first] if own else []):
        if not (fact := _restore(folder.location(step), named, role, lambda home: home.is_local)):
            return
        LOGGER.warning("%s is damaged: %s", folder.location(step), fact)
    if own and first:
        LOGGER.warning(
            "%s: variables of this process have their initial values, since no checkpoint is before step %d: %s",
            *(folder.path, first, ", ".join(own)),
        )


def _restore_newest(folder: CheckpointFolder, named: Mapping[str, NamedArray], role: Alone) -> int:
    """Restore the newest checkpoint that can be read; return the step after it, or 0 if there is no checkpoint."""
    damaged: dict[int, str] = {}
    for step in reversed(role.steps_to_restore(folder.path, folder.steps())):
        # A process that is no saver restores its own variables: those on tasks are restored by the saver.
        if fact := _restore(folder.location(step), named, role, lambda home: home.is_local or role.is_saver):
            damaged[step] = fact
            continue
        if not role.is_saver:
            return step + 1
        for other, fact in damaged.items():
            LOGGER.warning(
                "step_%d is damaged, and step_%d is restored: %s; it stays as %s",
                *(other, step, fact, folder.files.set_aside(folder.location(other).name, "damaged")),
            )
        LOGGER.info("%s is restored", folder.location(step))
        return step + 1
    if damaged:
        raise DamagedCheckpoint(
            f"{folder.path}: expected a checkpoint that can be read, got: {next(iter(damaged.values()))}",
            "put a copy of a checkpoint there, or give another folder to begin a new run",
        )
    return 0


def _restore(
    location: Location, named: Mapping[str, NamedArray], role: Alone, of: Callable[[StateBackend], bool]
) -> str:
    """Restore the variables of the backends that are `of` it; return why it cannot be read, empty if it is restored."""

    def restore(before_set: Callable[[], None]) -> None:
        restore_named(location, named, of=of, before_set=before_set)

    try:
        role.restore(location, named, restore)
    except (DamagedCheckpoint, NoCheckpoint) as error:
        return str(error).splitlines()[0]
    return ""
