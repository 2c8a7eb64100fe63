"""`dflow.save`: write a program's state to a directory or object store.

The file format is that of `lowering/files/array_files.py`. Invariant: a save sees the variables of each state backend
at one moment, between two steps.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.lowering.files.array_files import make_paths, write_manifest
from dflow.lowering.files.locations import location_of
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.orbax_layout import SUFFIX as ORBAX_SUFFIX
from dflow.lowering.files.orbax_layout import check_types
from dflow.lowering.files.owned_folder import whole_location
from dflow.lowering.files.safetensors_file import SUFFIX, write_safetensors
from dflow.lowering.files.whole_arrays import whole_here
from dflow.lowering.state_backend import indices_of
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.state.resources import Variable
from dflow.training.group_saving import (
    WriteParts,
    channel_of,
    check_seen,
    group_of,
    is_divided,
    refuse_parts,
    save_together,
    saved_once,
)
from dflow.training.named_arrays import NamedArray, Names, arrays_by_backend, named_variables, variables_of

#: Writes captured values and the manifest, with further metadata, into the empty folder of a `whole_location`.
WriteCheckpoint = Callable[[AbstractContextManager[Location], Mapping[str, Any]], None]


@suggests_keywords
def save(
    path: str | os.PathLike[str],
    variables: Any,
    *,
    overwrite: bool = False,
    names: Names | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the values of variables to the directory `path`, all at one moment.

    `path` may also be a URL in an object store: `gs://bucket/path`, `s3://bucket/path`, or `memory://path` for one in
    the memory of this process. `file:///path` is the local path.

    If `path` ends in `.safetensors`, it is a file of that format, which has fewer dtypes and no checksums, and whose
    values go through this process. If it ends in `.orbax`, the parts of the names are the keys of nested dicts for
    Orbax, as in the checkpoints of Flax programs.

    variables  a pytree of variables, generators and optimizers (meaning their slots); or the name of a container
    overwrite  whether to replace an existing checkpoint, which stays in place until the new one is complete
    names      array names that differ from the variables' names: a function from variable name to array name, a dict
               with only the names that differ, or pairs of a regular expression and its replacement, such as
               [("/", "."), ("kernel$", "weight")], applied to each variable's name one after another
    metadata   texts by name for a `.safetensors` file, such as {"format": "pt"}, which some programs ask for

    An array's default name is the name passed when its variable, generator or optimizer was created, or else its path
    in the pytree: the keys and indices joined by `/`, as in `layers/0/w`.

    With `AllReduce`, worker 0 writes the variables that each worker has whole. The others need not call `save`; those
    calls wait until the files are there. With parts on several workers, as by `fully_sharded=True`, all workers call
    `save`, and each writes its parts.

    Other threads and workers may keep training: the checkpoint is the state between two of their steps (on a cluster,
    between steps of strategies; see docs/saving.md). Each array is stored in
    zarr's format under its name, which zarr, TensorStore and Orbax can read. The data is on disk when the call returns;
    if the process or machine stops earlier, `path` is unchanged.

    Raises CheckpointExists if `path` exists and `overwrite` is False. Raises CheckpointError inside traced code, if two
    variables have the same name, if one has neither a name nor a key in its path, if `variables` contains anything else
    than the objects above, for `metadata` of another kind of path, or if writing fails.
    """
    location = given_location(path, "save")
    _check_metadata(location, metadata)
    named = named_variables(variables, names, "save")
    what = f"dflow.save({str(location)!r})"
    if isinstance(location, Path) and location.name.endswith(SUFFIX):
        refuse_parts(variables_of(named))

        def write_file() -> None:
            write_safetensors(location, _values(named), _generators(named), texts=metadata, overwrite=overwrite)

        with saved_once(group_of(variables_of(named)), what) as save_by:
            save_by(write_file)
    else:
        is_tree = location.name.endswith(ORBAX_SUFFIX)
        if is_tree:
            check_types({name: entry.type for name, entry in named.items()})
        with captured(named, what, is_tree=is_tree) as write:
            write(whole_location(location, overwrite=overwrite), {})
    if group_of(variables_of(named)) is not None:
        check_seen(location)


@contextmanager
def captured(
    named: Mapping[str, NamedArray],
    what: str,
    *,
    is_tree: bool = False,
    channel: str | None = None,
    timeout_s: float | None = None,
) -> Iterator[WriteCheckpoint]:
    """Take the values at one moment; the context gives a function that writes them and the manifest into a folder.

    Steps may run meanwhile. The function and the exit may be on another thread; it also takes further metadata.
    `what` describes the save, and `is_tree` is as for `make_paths`. `timeout_s` is the longest wait for other
    processes of a group, and `channel` as for `save_together`, by default that of the thread.
    """
    _warn_of_counts(named)
    types = {name: entry.type.strong for name, entry in named.items()}
    group = group_of(variables_of(named))
    is_together = any(map(is_divided, variables_of(named)))
    with ExitStack() as stack:
        save_by = stack.enter_context(saved_once(None if is_together else group, what, timeout_s))
        write_all = stack.enter_context(captured_values(named, group))

        def make(folder: Location) -> dict[str, str]:
            return make_paths(folder, types, is_tree=is_tree)

        def write(opened: AbstractContextManager[Location], metadata: Mapping[str, Any]) -> None:
            reach("save")

            def finish(folder: Location, paths: Mapping[str, str]) -> None:
                write_manifest(folder, types, paths, {**_generators(named), **metadata})

            own, on = group if is_together else None, channel or channel_of(what)
            save_by(lambda: save_together(own, what, on, opened, make, write_all, finish, timeout_s))

        yield write


@contextmanager
def captured_values(named: Mapping[str, NamedArray], group: ProcessGroup | None) -> Iterator[WriteParts]:
    """Take the values at one moment that this process writes, or tasks for it; the context gives the function for it.

    group  the processes that have the variables together, a result of `group_of`
    """
    mine = named
    if group is not None and group.rank > 0:  # rank 0 writes whole arrays, what it has alone, and what tasks have
        mine = {name: entry for name, entry in named.items() if any(map(is_divided, entry.variables))}
    with ExitStack() as stack:
        narrowings = {name: entry.narrowing for name, entry in mine.items() if entry.narrowing is not None}
        parts = [
            stack.enter_context(backend.capturing(here, narrowings))
            for backend, here in arrays_by_backend(mine).items()
        ]

        def write_all(folder: Location, paths: Mapping[str, str]) -> None:
            for write_part in parts:
                write_part(folder, paths)

        yield write_all


def _warn_of_counts(named: Mapping[str, NamedArray]) -> None:
    for variable in variables_of(named):
        variable.hooks.counts()


def _values(named: Mapping[str, NamedArray]) -> dict[str, Any]:
    """Return the values at one moment (on a cluster: one moment per task), brought to this process."""
    _warn_of_counts(named)
    found: dict[str, Any] = {}
    for backend, here in arrays_by_backend(named).items():
        values = iter(backend.read_together([one for held in here.values() for one in held]))
        for name, held in here.items():
            parts = list(itertools.islice(values, len(held)))
            wholes = [*map(whole_here, parts)]
            found[name] = wholes[0] if len(wholes) == 1 else _joined(named[name].type, held, wholes)
    return found


def _joined(type: ArrayType, held: Sequence[Variable], parts: Sequence[jax.Array]) -> Any:
    whole = np.empty(type.shape, type.dtype)
    for variable, part in zip(held, parts, strict=True):
        whole[indices_of(variable).slices] = part
    return whole


def _generators(named: Mapping[str, NamedArray]) -> dict[str, dict[str, str]]:
    """Return the metadata with the algorithm of each generator."""
    return {"generators": {name: entry.impl for name, entry in named.items() if entry.impl}}


def _check_metadata(location: Location, given: Mapping[str, str] | None) -> None:
    if given is None:
        return
    if not location.name.endswith(SUFFIX):
        raise CheckpointError(
            f"save: metadata: expected None for a path without {SUFFIX}, got {given!r}",
            "leave it out, or keep it in a file beside the checkpoint",
        )
    if "dflow" in given or not all(isinstance(text, str) for entry in given.items() for text in entry):
        raise CheckpointError(
            f"save: metadata: expected a dict of texts by names other than 'dflow', got {given!r}",
            "write other values as texts, for instance by json.dumps",
        )


def given_location(path: str | os.PathLike[str], task: str) -> Location:
    """Return the location of a path or URL. Raises CheckpointError for another type, or a URL that is not supported."""
    given: Any = path
    if not isinstance(given, str | bytes | os.PathLike):
        raise CheckpointError(
            f"{task} was given a {type(given).__name__} as its path",
            f"give the path first, and then the variables: dflow.{task}(path, variables)",
        )
    location = location_of(os.fsdecode(path))
    if isinstance(location, ObjectPath) and location.name.endswith((SUFFIX, ORBAX_SUFFIX)):
        raise CheckpointError(
            f"{location}: expected the URL of a folder that dflow writes, got one that ends in {SUFFIX} or "
            f"{ORBAX_SUFFIX}",
            "use a local path, and copy the file or folder",
        )
    return location
