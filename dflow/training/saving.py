"""`dflow.save` and `dflow.restore`: write a program's state to a directory or object store, and read it back.

The file format is that of `lowering/files/array_files.py`. Invariants: a save sees the variables of each state backend
at one moment, between two steps; a restore changes all of a process's variables or none.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from dflow.lowering.files.array_files import make_places, write_manifest
from dflow.lowering.files.object_path import ObjectPath, Place
from dflow.lowering.files.orbax_layout import SUFFIX as ORBAX_SUFFIX
from dflow.lowering.files.orbax_layout import check_types
from dflow.lowering.files.owned_folder import whole_place
from dflow.lowering.files.places import place_of
from dflow.lowering.files.safetensors_file import SUFFIX, write_safetensors
from dflow.lowering.files.saved_arrays import SavedArrays, open_arrays
from dflow.lowering.files.whole_arrays import whole_here
from dflow.lowering.state_backend import SavedVariables, StateBackend, indices_of
from dflow.state_backends import by_backend
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.moments import reach
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.path_names import path_name
from dflow.tracing.primitives.namesakes import use_beside_namesakes
from dflow.tracing.rows.slices import have_each_once
from dflow.tracing.source import at
from dflow.tracing.state.container import resources_in
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.resources import Variable, is_variable
from dflow.training.generator import Generator
from dflow.training.group_saving import (
    channel_of,
    check_seen,
    group_of,
    is_divided,
    refuse_parts,
    restored_together,
    save_together,
    saved_once,
)
from dflow.training.optimizer import Optimizer
from dflow.training.restore_comparison import compared, differs
from dflow.training.restore_report import DIFFERENCES, RestoreReport

#: Array names that differ from the variables' names: a mapping or function from variable name to array name.
Names = Mapping[str, str] | Callable[[str], str]

#: Writes captured values and the manifest, with further metadata, into the empty folder of a context, as `whole_place`.
WriteCheckpoint = Callable[[AbstractContextManager[Place], Mapping[str, Any]], None]

_Path = tuple[Any, ...]

#: Most attempts of a restore; each retry is because the checkpoint was replaced during the read.
_ATTEMPTS = 5


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
    names      array names that differ from the variables' names: a function from variable name to array name, or a
               dict with only the names that differ
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
    place = given_place(path, "save")
    _check_metadata(place, metadata)
    named = named_variables(variables, names, "save")
    what = f"dflow.save({str(place)!r})"
    if isinstance(place, Path) and place.name.endswith(SUFFIX):
        refuse_parts(_variables_of(named))

        def write_file() -> None:
            write_safetensors(place, _values(named), _generators(named), texts=metadata, overwrite=overwrite)

        with saved_once(group_of(_variables_of(named)), what) as save_by:
            save_by(write_file)
    else:
        is_tree = place.name.endswith(ORBAX_SUFFIX)
        if is_tree:
            check_types({name: entry.type for name, entry in named.items()})
        with captured(named, what, is_tree=is_tree) as write:
            write(whole_place(place, overwrite=overwrite), {})
    if group_of(_variables_of(named)) is not None:
        check_seen(place)


@suggests_keywords
def restore(
    path: str | os.PathLike[str],
    variables: Any,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
    names: Names | None = None,
    cast: bool = False,
) -> RestoreReport:
    """Set variables to the values that `save` wrote, all at one moment; return a report.

    path, variables, names  as for `save`
    strict  whether the checkpoint and the variables must have the same arrays; if False, restore the arrays that match
    ignore  differences to allow although `strict` is True: "missing" (a variable without an array in the checkpoint),
            "unexpected" (an array without a variable), "changed" (a different shape, dtype or generator algorithm)
    cast    whether arrays of another dtype than their variables are converted, such as float16 to float32, with
            rounding; not floating-point numbers to integers, nor complex ones to real ones

    Each variable keeps its own sharding. All arrays are read and checked before any variable changes, so an error
    leaves every variable as it was; only TaskLost, on a cluster, may leave those of other tasks restored. Generators
    continue from their saved state. Variables of `AllReduce` are restored by all workers, and compared.

    Raises NoCheckpoint if `path` has none. Raises CheckpointError inside traced code, with a table for differences that
    are not allowed, or if the checkpoint keeps being replaced during the read; DamagedCheckpoint for a damaged
    array or manifest, which it names.
    """
    given: Any = ignore
    if isinstance(given, str) or not set(given) <= set(DIFFERENCES):
        raise CheckpointError(f"restore was given ignore={ignore!r}", f"give it some of {list(DIFFERENCES)}")
    place = given_place(path, "restore")
    named = named_variables(variables, names, "restore")

    def work(before_set: Callable[[], None]) -> RestoreReport:
        return restore_named(place, named, ignore if strict else DIFFERENCES, casts=cast, before_set=before_set)

    group = group_of(_variables_of(named))
    return work(lambda: None) if group is None else restored_together(group, place, [*_variables_of(named)], work)


def restore_named(
    place: Place,
    named: Mapping[str, NamedArray],
    ignore: Collection[str] = (),
    of: Callable[[StateBackend], bool] = lambda backend: True,
    *,
    casts: bool = False,
    before_set: Callable[[], None] = lambda: None,
) -> RestoreReport:
    """As `restore`, for the variables of those backends that are `of` it; all are compared with the checkpoint.

    before_set  called when all values are read, before the first is set
    """
    for _ in range(_ATTEMPTS):
        files = open_arrays(place)
        named = {_stored(name, files.types): entry for name, entry in named.items()}
        report = compared(files, named, casts)
        if refused := report.refused(ignore):
            raise CheckpointError(differs(files, named, report, refused))
        restored = {name: named[name] for name in report.restored}
        if _restored(files, restored, of, before_set):
            use_beside_namesakes(_variables_of(restored))
            for variable in _variables_of(restored):
                if of(cast(StateBackend, variable.home)):
                    variable.hooks.restored()
            return report
    raise CheckpointError(
        f"{place} was replaced {_ATTEMPTS} times while it was read",
        "save less often to one path, or to a new path each time",
    )


def _stored(name: str, types: Mapping[str, ArrayType]) -> str:
    """Return the name of an array in a checkpoint with these: one beside another array may have its `.orbax` key."""
    parent, _, last = name.rpartition("/")
    key = f"{parent}.{last}"
    return key if parent in types and name not in types and key in types else name


@dataclass(frozen=True)
class NamedArray:
    """An array to save or restore under its default name; `impl` is a generator's algorithm, or empty.

    `variables`  the variable, or the variables that divide the array, in the order of their indices
    """

    variables: tuple[Variable, ...]
    name: str
    impl: str = ""

    @property
    def type(self) -> ArrayType:
        """The type of the array."""
        first = self.variables[0]
        return first.type if first.part is None else replace(first.type, shape=first.part.whole)


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
    `what` describes the save, and `is_tree` is as for `make_places`. `timeout_s` is the longest wait for other
    processes of a group, and `channel` as for `save_together`, by default that of the thread.
    """
    types = {name: entry.type.strong for name, entry in named.items()}
    group = group_of(_variables_of(named))
    is_together = any(map(is_divided, _variables_of(named)))
    # Rank 0 writes whole arrays, what it has alone, and what tasks have.
    mine = named if group is None or group.rank == 0 else _divided(named)
    with ExitStack() as stack:
        save_by = stack.enter_context(saved_once(None if is_together else group, what, timeout_s))
        parts = [stack.enter_context(backend.capturing(here)) for backend, here in _by_backend(mine).items()]

        def make(folder: Place) -> dict[str, str]:
            return make_places(folder, types, is_tree=is_tree)

        def write_all(folder: Place, places: Mapping[str, str]) -> None:
            for write_part in parts:
                write_part(folder, places)

        def write(opened: AbstractContextManager[Place], metadata: Mapping[str, Any]) -> None:
            reach("save")

            def finish(folder: Place, places: Mapping[str, str]) -> None:
                write_manifest(folder, types, places, {**_generators(named), **metadata})

            def write_alone() -> None:
                with opened as folder:
                    places = make(folder)
                    write_all(folder, places)
                    finish(folder, places)

            if group is not None and is_together:
                save_together(group, what, channel or channel_of(what), opened, make, write_all, finish, timeout_s)
            else:
                save_by(write_alone)

        yield write


def _divided(named: Mapping[str, NamedArray]) -> dict[str, NamedArray]:
    return {name: entry for name, entry in named.items() if any(map(is_divided, entry.variables))}


def _variables_of(named: Mapping[str, NamedArray]) -> Iterator[Variable]:
    return (variable for entry in named.values() for variable in entry.variables)


def _values(named: Mapping[str, NamedArray]) -> dict[str, Any]:
    """Return the values at one moment (on a cluster: one moment per task), brought to this process."""
    found: dict[str, Any] = {}
    for backend, here in _by_backend(named).items():
        values = iter(backend.snapshot([one for held in here.values() for one in held]))
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


def _by_backend(named: Mapping[str, NamedArray]) -> dict[StateBackend, SavedVariables]:
    # The variables of one array have one home.
    homes = by_backend({name: entry.variables[0] for name, entry in named.items()})
    return {home: {name: named[name].variables for name in here} for home, here in homes.items()}


def _check_metadata(place: Place, given: Mapping[str, str] | None) -> None:
    if given is None:
        return
    if not place.name.endswith(SUFFIX):
        raise CheckpointError(
            f"save: metadata: expected None for a path without {SUFFIX}, got {given!r}",
            "leave it out, or keep it in a file beside the checkpoint",
        )
    if "dflow" in given or not all(isinstance(text, str) for entry in given.items() for text in entry):
        raise CheckpointError(
            f"save: metadata: expected a dict of texts by names other than 'dflow', got {given!r}",
            "write other values as texts, for instance by json.dumps",
        )


def _generators(named: Mapping[str, NamedArray]) -> dict[str, dict[str, str]]:
    """Return the metadata with the algorithm of each generator."""
    return {"generators": {name: entry.impl for name, entry in named.items() if entry.impl}}


def named_variables(tree: Any, names: Names | None, task: str) -> dict[str, NamedArray]:
    """Return the arrays that the variables in `tree` are saved as, by array name."""
    if is_tracing():
        raise CheckpointError(
            f"{task} is called inside traced code, which runs once, not once a step",
            "call it between steps, or in another thread",
        )
    named: dict[str, NamedArray] = {}
    called: dict[Variable, str] = {}
    for entry in _entries(tree, task):
        [variable] = entry.variables
        name = called.setdefault(variable, _array_name(entry.name, names))
        held = named.get(name)
        is_held = held is not None and any(_is_same(one, variable) for one in held.variables)
        if held is None or (entry.impl and is_held):
            named[name] = entry
        elif not is_held:
            other = held.variables[0]
            if variable.part is None or other.part is None or entry.type != held.type:
                raise CheckpointError(
                    f"two variables would be the array {name!r}: {other!r}{at(other.loc)}\n"
                    f"  and {variable!r}{at(variable.loc)}\n  give one of them another name, or say names="
                )
            named[name] = replace(held, variables=(*held.variables, variable))
    _check_used(named, names, task)
    return {name: entry if entry.variables[0].part is None else _in_order(name, entry) for name, entry in named.items()}


def _is_same(one: Variable, other: Variable) -> bool:
    """Return whether two handles are of one variable: a program may make a variable on tasks twice, by its name."""
    is_shared = one.home.shares_names and one.home == other.home
    return one is other or (is_shared and one.name == other.name)


def _in_order(name: str, entry: NamedArray) -> NamedArray:
    """Return the entry with its variables in the order of their indices. Raises CheckpointError if one is missing."""
    variables = sorted(entry.variables, key=lambda one: indices_of(one).start)
    parts = [indices_of(one) for one in variables]
    axis = parts[0].axis
    if {part.axis for part in parts} != {axis} or not have_each_once(parts, entry.type.shape[axis]):
        raise CheckpointError(
            f"array {name!r}: expected variables that have each part of {entry.type} once, got "
            f"{', '.join(one.name for one in variables)}",
            "give the sharded variable itself, or all of its shards",
        )
    if len(variables) > 1 and (spread := [*filter(is_divided, variables)]):
        raise CheckpointError(
            f"array {name!r}: expected shards that each process has whole, got parts of {spread[0].name!r}",
            "leave shards out, or make it a dflow.Variable: the mesh divides it",
        )
    return replace(entry, variables=tuple(variables))


def _check_used(named: Mapping[str, NamedArray], names: Names | None, task: str) -> None:
    """Raise CheckpointError if there are no variables, or if `names` mentions unknown ones."""
    if not named:
        raise CheckpointError(f"{task} was given no variables", "give it some, in a pytree or by container")
    known = {entry.name for entry in named.values()}
    if isinstance(names, Mapping) and (strange := sorted(set(names) - known)):
        near = difflib.get_close_matches(strange[0], known, n=1)
        raise CheckpointError(
            f"names has {', '.join(map(repr, strange))}, which no variable given to {task} is called",
            f"{f'did you mean {near[0]!r}?' if near else f'the variables are {sorted(known)}'}",
        )


def _array_name(name: str, names: Names | None) -> str:
    given: Any = name if names is None else names(name) if callable(names) else names.get(name, name)
    if not isinstance(given, str):
        raise CheckpointError(f"names gives {given!r} for variable {name!r}, a {type(given).__name__}", "give a string")
    return given


def _entries(tree: Any, task: str) -> Iterator[NamedArray]:
    flat: list[tuple[_Path, Any]]
    if isinstance(tree, str):
        flat = [((), resource) for resource in resources_in(tree)]
    else:
        flat, _ = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda leaf: isinstance(leaf, Variable | Generator | HostResource)
        )
    for path, leaf in flat:
        match leaf:
            case Optimizer():
                yield from _slots(path, leaf, task)
            case Generator():
                yield NamedArray((leaf.key,), _name_of(path, leaf.key, "generator", task), leaf.impl)
            case Variable() if leaf.is_saved:
                array = NamedArray((leaf,), _name_of(path, leaf, "variable", task))
                yield array
                for kind, variable in leaf.hooks.saved.items():
                    yield NamedArray((variable,), f"{array.name}/{kind}")
            case Variable():
                continue
            case HostResource():
                raise CheckpointError(
                    f"{task} was given {leaf.title}, and what is in queues and accumulators is not saved",
                    "leave it out, or take its elements out into variables",
                )
            case _:
                raise CheckpointError(
                    f"{task} was given a {type(leaf).__name__} among its variables",
                    "give it variables, generators and optimizers; dflow.variables(tree) makes variables of arrays",
                )


def _slots(path: _Path, optimizer: Optimizer, task: str) -> Iterator[NamedArray]:
    flat, _ = jax.tree_util.tree_flatten_with_path(optimizer.slots, is_leaf=is_variable)
    prefix = _name_of(path, optimizer, "optimizer", task) if flat else ""
    for inner, slot in flat:
        yield NamedArray((slot,), _array_of(slot) if slot.is_named else f"{prefix}/{path_name(_path_of(inner, slot))}")


def _array_of(variable: Variable | Optimizer) -> str:
    """Return the name of the array; shard n of `table` and its slots are named `.../table/n`."""
    return variable.name.rpartition("/")[0] if _is_part(variable) else variable.name


def _path_of(path: _Path, variable: Variable | Optimizer) -> _Path:
    """Return the path of the array; that of a shard ends with its number."""
    return path[:-1] if _is_part(variable) else path


def _is_part(held: Variable | Optimizer) -> bool:
    return isinstance(held, Variable) and held.part is not None


def _name_of(path: _Path, held: Variable | Optimizer, kind: str, task: str) -> str:
    """Return the name passed by the user, or else the path: a generated name may differ in another program."""
    if held.is_named:
        return _array_of(held)
    path = _path_of(path, held)
    if not any(isinstance(key, jax.tree_util.DictKey | jax.tree_util.GetAttrKey) for key in path):
        raise CheckpointError(
            f"{task} was given {kind} {held.name!r}, whose name is made up and may be that of another in another "
            f"program",
            f"make it with name='...', or give it in a dict by the name to use: dflow.{task}(path, {{'name': ...}})",
        )
    return path_name(path)


def given_place(path: str | os.PathLike[str], task: str) -> Place:
    """Return the place of a path or URL. Raises CheckpointError for another type, or a URL that is not supported."""
    given: Any = path
    if not isinstance(given, str | bytes | os.PathLike):
        raise CheckpointError(
            f"{task} was given a {type(given).__name__} as its path",
            f"give the path first, and then the variables: dflow.{task}(path, variables)",
        )
    place = place_of(os.fsdecode(path))
    if isinstance(place, ObjectPath) and place.name.endswith((SUFFIX, ORBAX_SUFFIX)):
        raise CheckpointError(
            f"{place}: expected the URL of a folder that dflow writes, got one that ends in {SUFFIX} or {ORBAX_SUFFIX}",
            "use a local path, and copy the file or folder",
        )
    return place


def _restored(
    files: SavedArrays,
    named: Mapping[str, NamedArray],
    of: Callable[[StateBackend], bool],
    before_set: Callable[[], None],
) -> bool:
    """Read and set the variables. Return False, with nothing set, if the checkpoint was replaced meanwhile."""
    with ExitStack() as stack:
        try:
            settings = [
                stack.enter_context(backend.restoring(files, here))
                for backend, here in _by_backend(named).items()
                if of(backend)
            ]
        except CheckpointError:
            if not files.is_replaced():
                raise
            return False
        if files.is_replaced():
            return False
        before_set()
        for set_all in settings:
            set_all()
    return True
