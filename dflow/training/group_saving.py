"""Checkpoints of variables that are spread over the processes of a group: each process writes its own parts.

The process of rank 0 makes the folder, and puts it in place when all have written their parts. Every process has to
save at the same point of its program. A restore needs no other process: each reads its own parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jax.sharding import Sharding

from dflow.distributed.collectives.process_group import ProcessGroup, current_group
from dflow.lowering.files.object_path import Place
from dflow.lowering.files.places import place_of
from dflow.tracing.errors import CheckpointError
from dflow.tracing.state.resources import Variable

#: Writes this process's arrays into a folder, at the places given by name.
_SHARED = "give a folder that all workers see, as on a shared file system"
WriteParts = Callable[[Place, Mapping[str, str]], None]


def is_of_group(variable: Variable) -> bool:
    """Whether other processes have parts or copies of the variable's value."""
    sharding = variable.sharding
    return isinstance(sharding, Sharding) and not sharding.is_fully_addressable


def group_of(variables: Iterable[Variable]) -> ProcessGroup | None:
    """Return the group of processes that have these variables together; None if this process has them all.

    Raises CheckpointError after the group has ended.
    """
    spread = next(filter(is_of_group, variables), None)
    group = current_group()
    if spread is not None and group is None:
        raise CheckpointError(
            f"variable {spread.name!r} is on several processes, which have left their group",
            "save before cluster.close()",
        )
    return None if spread is None else group


def refuse_parts(variables: Iterable[Variable]) -> None:
    """Raise CheckpointError for a variable in parts on several processes: a file of one process has whole arrays."""
    for variable in variables:
        sharding = variable.sharding
        if isinstance(sharding, Sharding) and not (sharding.is_fully_addressable or sharding.is_fully_replicated):
            raise CheckpointError(
                f"variable {variable.name!r}: expected its whole value in this process, got parts on several processes",
                "save to a folder, whose parts each process writes",
            )


def save_together(
    group: ProcessGroup,
    channel: str,
    opened: AbstractContextManager[Place],
    make_places: Callable[[Place], Mapping[str, str]],
    write_parts: WriteParts,
    finish: Callable[[Place, Mapping[str, str]], None],
    timeout_s: float | None = None,
) -> None:
    """Write a checkpoint with the other processes of the group. Returns, on all, when it is complete.

    channel      as for `ProcessGroup.exchange`
    opened       gives the empty folder, which is in place after it; used, as `make_places` and `finish`, on rank 0 only
    make_places  returns the places of all arrays in the folder
    finish       called when all parts are written
    timeout_s    longest wait for the other processes
    raises       CheckpointError on all processes when one of them fails
    """
    point = f"a save in {channel!r}"

    def tell(what: str, word: str = "") -> list[str]:
        return [*group.exchange(f"{point}, {what}", word, channel=channel, timeout_s=timeout_s)]

    def write(folder: Place, places: Mapping[str, str]) -> None:
        if isinstance(folder, Path) and not folder.is_dir():
            raise CheckpointError(f"{folder.parent} is another folder in this process", _SHARED)
        write_parts(folder, places)

    def written(folder: Place, places: Mapping[str, str]) -> None:
        error = _error_of(lambda: write(folder, places))
        _check(group, tell("parts written", "" if error is None else _text(error)))

    if group.rank > 0:
        word = json.loads(tell("folder made")[0])
        _check(group, [word.get("error", "")])
        written(place_of(word["folder"]), word["places"])
        _check(group, tell("complete")[:1])
        return
    told: list[str] = []

    def save() -> None:
        with opened as folder:
            places = make_places(folder)
            told.append("folder made")
            tell(told[0], json.dumps({"folder": str(folder), "places": dict(places)}))
            written(folder, places)
            told.append("parts written")
            finish(folder, places)

    error = _error_of(save)
    if error is not None and not told:
        tell("folder made", json.dumps({"error": _text(error)}))
    elif len(told) == 2:
        tell("complete", "" if error is None else _text(error))
    if error is not None:
        raise error


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:  # of any kind: the other processes wait for the end of this one's part
        return error
    return None


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _check(group: ProcessGroup, errors: list[str]) -> None:
    """Raise CheckpointError with the errors of the processes, by rank."""
    found = [f"{name}: {error}" for name, error in zip(group.names, errors, strict=False) if error]
    if found:
        raise CheckpointError("; ".join(found), "remove the cause, and save again")


def agreed_steps(group: ProcessGroup, folder: Place, steps: Sequence[int]) -> list[int]:
    """Return the steps whose checkpoints the process of rank 0 sees. Raises CheckpointError if another one does not."""
    seen = list(map(json.loads, group.exchange(f"the checkpoints in {folder}", json.dumps([*steps]))))
    for name, there in zip(group.names, seen, strict=True):
        if missing := sorted({*seen[0]} - {*there}):
            raise CheckpointError(
                f"{folder}: expected the same checkpoints on all workers, got no step_{missing[0]} on {name}", _SHARED
            )
    return [*seen[0]]


def agreed_failure(group: ProcessGroup, place: Place, fact: str) -> str:
    """Return the first of the reasons why a checkpoint cannot be restored, by rank; empty if all have restored it."""
    errors = zip(group.names, group.exchange(f"the restore of {place}", fact), strict=True)
    return next((f"{name}: {error}" for name, error in errors if error), "")
