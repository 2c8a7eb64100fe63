"""Checkpoints of variables that are spread over the processes of a group.

If each process has the whole of every variable, the process of rank 0 writes the checkpoint without a wait for others.
Another process that does the same save waits until the checkpoint is complete. Else each process writes its own parts:
the process of rank 0 makes the folder, and puts it in place when all have written theirs. Then every process has to
save at the same point of its program. Each process reads its own parts of a checkpoint.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar, cast

from jax.sharding import Sharding

from dflow.distributed.collectives.compared_variables import compare_variables
from dflow.distributed.collectives.group_messages import MAIN
from dflow.distributed.collectives.process_group import ProcessGroup, current_group
from dflow.lowering.files.locations import location_of
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.whole_arrays import is_whole_in_each
from dflow.lowering.local import LocalHome
from dflow.tracing.errors import (
    CheckpointError,
    CheckpointExists,
    DamagedCheckpoint,
    DflowError,
    NoCheckpoint,
    TaskLost,
)
from dflow.tracing.state.resources import Variable

#: Longest wait of `dflow.save` for the other processes to begin it too, in s.
MEET_S = 120.0
_SHARED = "give a folder that all workers see, as on a shared file system"
#: Saves by the function that it is given, or waits until another process has done so.
Save = Callable[[Callable[[], None]], None]
#: Writes this process's arrays into a folder, at the paths given by name.
WriteParts = Callable[[Location, Mapping[str, str]], None]

Restored = TypeVar("Restored")


def is_of_group(variable: Variable) -> bool:
    """Whether other processes have parts or copies of the variable's value."""
    sharding = variable.sharding
    return isinstance(sharding, Sharding) and not sharding.is_fully_addressable


def is_divided(variable: Variable) -> bool:
    """Whether processes of the group have only parts of the variable's value."""
    sharding = variable.sharding
    return isinstance(sharding, Sharding) and not is_whole_in_each(sharding, variable.shape)


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
    for variable in filter(is_divided, variables):
        raise CheckpointError(
            f"variable {variable.name!r}: expected its whole value in this process, got parts on several processes",
            "save to a folder, whose parts each process writes",
        )


@contextmanager
def saved_once(group: ProcessGroup | None, what: str, timeout_s: float | None = None) -> Iterator[Save]:
    """Return the context of a save of whole values, which gives a function that saves by the function it is given.

    On rank 0, and without a group, it is called, without a wait for others. Elsewhere it is not: they wait until rank
    0 has done so.
    The function and the exit may be on another thread.

    what       description of the save, the same on all processes
    timeout_s  longest wait for rank 0
    raises     CheckpointError on the others when it fails; StrategyError when rank 0 goes on without it
    """
    if group is None:
        yield lambda save: save()
        return
    work = group.leader_work(what)

    def awaited(save: Callable[[], None]) -> None:
        ended = group.await_leader(work, timeout_s)
        _refuse_failed(group, ended.kind, ended.error)

    if group.rank > 0:
        yield awaited
        return
    with group.leading(work):
        yield lambda save: save()


def channel_of(what: str) -> str:
    """Return the channel of this thread for a save."""
    return MAIN if threading.current_thread() is threading.main_thread() else what


def check_seen(location: Location) -> None:
    """Raise CheckpointError if a file or folder that rank 0 has written is not here."""
    if isinstance(location, Path) and not location.exists():
        raise CheckpointError(f"{location}: expected what worker:0 has written, got nothing in this process", _SHARED)


def save_together(
    group: ProcessGroup | None,
    what: str,
    channel: str,
    opened: AbstractContextManager[Location],
    make_paths: Callable[[Location], Mapping[str, str]],
    write_parts: WriteParts,
    finish: Callable[[Location, Mapping[str, str]], None],
    timeout_s: float | None = None,
) -> None:
    """Write a checkpoint with the other processes of the group, or alone. Returns, on all, when it is complete.

    what         description of the save, the same on all processes
    channel      as for `ProcessGroup.exchange`
    opened       gives the empty folder, which is in place after it; used, as `make_paths` and `finish`, on rank 0 only
    make_paths   returns the paths of all arrays in the folder
    finish       called when all parts are written
    timeout_s    longest wait for the other processes
    raises       CheckpointError on all processes when one of them fails
    """
    if group is None:
        with opened as folder:
            paths = make_paths(folder)
            write_parts(folder, paths)
            finish(folder, paths)
        return

    def tell(event: str, word: str = "") -> list[str]:
        point = f"{what} of variables in parts, which all workers write together ({event})"
        wait_s = MEET_S if timeout_s is None and event == "folder made" else timeout_s
        return [*group.exchange(point, word, channel=channel, timeout_s=wait_s)]

    def write(folder: Location, paths: Mapping[str, str]) -> None:
        if isinstance(folder, Path) and not folder.is_dir():
            raise CheckpointError(f"{folder.parent} is another folder in this process", _SHARED)
        write_parts(folder, paths)

    def written(folder: Location, paths: Mapping[str, str]) -> None:
        error = _error_of(lambda: write(folder, paths))
        _check(group, tell("parts written", "" if error is None else _text(error)))

    if group.rank > 0:
        word = json.loads(tell("folder made")[0])
        _refuse_failed(group, word.get("kind", ""), word.get("error", ""))
        written(location_of(word["folder"]), word["places"])
        _check(group, tell("complete")[:1])
        return
    told: list[str] = []

    def save() -> None:
        with opened as folder:
            paths = make_paths(folder)
            told.append("folder made")
            tell(told[0], json.dumps({"folder": str(folder), "places": dict(paths)}))
            written(folder, paths)
            told.append("parts written")
            finish(folder, paths)

    error = _error_of(save)
    if error is not None and not told:
        tell("folder made", json.dumps({"kind": type(error).__name__, "error": _text(error)}))
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


def _refuse_failed(group: ProcessGroup, kind: str, error: str) -> None:
    """Raise the error of rank 0, whose class is called `kind`, if there is one."""
    if error:
        raised = CheckpointExists if kind == CheckpointExists.__name__ else CheckpointError
        raise raised(f"{group.names[0]}: {error}", "remove the cause, and save again")


def _check(group: ProcessGroup, errors: list[str]) -> None:
    """Raise CheckpointError with the errors of the processes, by rank."""
    found = [f"{name}: {error}" for name, error in zip(group.names, errors, strict=False) if error]
    if found:
        raise CheckpointError("; ".join(found), "remove the cause, and try again")


def restored_together(
    group: ProcessGroup,
    location: Location,
    variables: Sequence[Variable],
    restore: Callable[[Callable[[], None]], Restored],
) -> Restored:
    """Return what `restore` gives, which restores variables from a checkpoint on each process of the group.

    variables  all that are restored; the values of the group's are compared
    restore    calls its argument between reading all values and setting them: it raises if another process has failed
    raises     on all when it fails on one, before any sets a variable: DamagedCheckpoint if it cannot be read, else
               TaskLost or CheckpointError; StrategyError if the values differ, or other processes do something else
    """
    channel, found = channel_of(what := f"dflow.restore({str(location)!r})"), list[Restored]()
    ahead = ["values read", "values set"]

    def meet(error: Exception | None = None) -> None:
        event, *rest = ahead
        ahead.clear()  # after an error no process comes to a further meeting
        word = "" if error is None else json.dumps([_kind(error), _text(error)])
        words = group.exchange(f"{what} ({event})", word, channel=channel)
        _check_read(group, words, error)
        ahead.extend(rest)

    error = _error_of(lambda: found.append(restore(meet)))
    if ahead:
        meet(error)
    elif error is not None:
        raise error
    if ours := [*filter(is_of_group, variables)]:
        # All of them live in this process.
        home = cast(LocalHome, ours[0].home)
        remedy = "restore from the same checkpoint on all workers"
        compare_variables(group, home.store, ours, what, channel=channel, remedy=remedy)
    [report] = found
    return report


#: The classes of errors of a restore; if processes have errors of several, all raise one of the last of these.
_KINDS: tuple[type[DflowError], ...] = (DamagedCheckpoint, TaskLost, CheckpointError)


def _kind(error: Exception) -> int:
    """Return the number in `_KINDS` of an error's class."""
    if isinstance(error, DamagedCheckpoint | NoCheckpoint):
        return 0
    return 1 if isinstance(error, TaskLost) else 2


def _check_read(group: ProcessGroup, words: Sequence[str], own: Exception | None) -> None:
    """Raise an error if processes have some, on all of one class; a word has the kind and the text, by rank."""
    found = {name: json.loads(word) for name, word in zip(group.names, words, strict=True) if word}
    if not found:
        return
    kind = max(kind for kind, _ in found.values())
    if own is not None and _kind(own) == kind:
        raise own
    text = "; ".join(f"{name}: {text}" for name, (_, text) in found.items())
    raise _KINDS[kind](text, "remove the cause, and try again")


def agreed_steps(group: ProcessGroup, folder: Location, steps: Sequence[int]) -> list[int]:
    """Return the steps whose checkpoints the process of rank 0 sees. Raises CheckpointError if another one does not."""
    seen = list(map(json.loads, group.exchange(f"the checkpoints in {folder}", json.dumps([*steps]))))
    for name, there in zip(group.names, seen, strict=True):
        if missing := sorted({*seen[0]} - {*there}):
            raise CheckpointError(
                f"{folder}: expected the same checkpoints on all workers, got no step_{missing[0]} on {name}", _SHARED
            )
    return [*seen[0]]
