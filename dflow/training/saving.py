"""`dflow.save` and `dflow.restore`: write a program's state to a directory or object store, and read it back.

The file format is that of `lowering/files/array_files.py`. Invariants: a save sees the variables of each state backend
at one moment, between two steps; a restore changes all of a process's variables or none.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from dflow.lowering.files.array_files import make_places, write_manifest
from dflow.lowering.files.array_manifest import damaged
from dflow.lowering.files.object_path import ObjectPath, Place
from dflow.lowering.files.orbax_layout import SUFFIX as ORBAX_SUFFIX
from dflow.lowering.files.orbax_layout import check_types
from dflow.lowering.files.owned_folder import whole_place
from dflow.lowering.files.places import place_of
from dflow.lowering.files.safetensors_file import SUFFIX, write_safetensors
from dflow.lowering.files.saved_arrays import SavedArrays, open_arrays
from dflow.lowering.state_backend import StateBackend
from dflow.state_backends import by_backend
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.primitives.namesakes import use_beside_namesakes
from dflow.tracing.source import at, caller
from dflow.tracing.state.container import resources_in
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.resources import Variable, is_variable, path_name
from dflow.training.generator import Generator
from dflow.training.group_saving import group_of, is_of_group, refuse_parts, save_together
from dflow.training.optimizer import Optimizer
from dflow.training.restore_report import DIFFERENCES, RestoreReport

#: Array names that differ from the variables' names: a mapping or function from variable name to array name.
Names = Mapping[str, str] | Callable[[str], str]

#: Writes captured values and the manifest, with further metadata, into the empty folder of a context, as `whole_place`.
WriteCheckpoint = Callable[[AbstractContextManager[Place], Mapping[str, Any]], None]

_Path = tuple[Any, ...]

#: Most attempts of a restore; each retry is because the checkpoint was replaced during the read.
_ATTEMPTS = 5


@suggests_keywords
def save(path: str | os.PathLike[str], variables: Any, *, overwrite: bool = False, names: Names | None = None) -> None:
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

    An array's default name is the name passed when its variable, generator or optimizer was created, or else its path
    in the pytree: the keys and indices joined by `/`, as in `layers/0/w`.

    Variables of `AllReduce` are saved by all workers together: each calls `save`, and writes its own parts.

    Other threads and workers may keep training: the checkpoint is the state between two of their steps (on a cluster,
    between steps of strategies; see docs/saving.md). Each array is stored in
    zarr's format under its name, which zarr, TensorStore and Orbax can read. The data is on disk when the call returns;
    if the process or machine stops earlier, `path` is unchanged.

    Raises CheckpointExists if `path` exists and `overwrite` is False. Raises CheckpointError inside traced code, if two
    variables have the same name, if one has neither a name nor a key in its path, if `variables` contains anything else
    than the objects above, or if writing fails.
    """
    place = given_place(path, "save")
    named = named_variables(variables, names, "save")
    if isinstance(place, Path) and place.name.endswith(SUFFIX):
        refuse_parts(entry.variable for entry in named.values())
        group = group_of(entry.variable for entry in named.values())
        if group is None or group.rank == 0:
            write_safetensors(place, _values(named), _generators(named), overwrite=overwrite)
        return
    is_tree = place.name.endswith(ORBAX_SUFFIX)
    if is_tree:
        check_types({name: entry.variable.type for name, entry in named.items()})
    with captured(named, is_tree=is_tree) as write:
        write(whole_place(place, overwrite=overwrite), {})


@suggests_keywords
def restore(
    path: str | os.PathLike[str],
    variables: Any,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
    names: Names | None = None,
) -> RestoreReport:
    """Set variables to the values that `save` wrote, all at one moment; return a report.

    path, variables, names  as for `save`
    strict  whether the checkpoint and the variables must have the same arrays; if False, restore the arrays that match
    ignore  differences to allow although `strict` is True: "missing" (a variable without an array in the checkpoint),
            "unexpected" (an array without a variable), "changed" (a different shape, dtype or generator algorithm)

    Each variable keeps its own sharding. All arrays are read and checked before any variable changes, so an error
    leaves every variable as it was; only TaskLost, on a cluster, may leave those of other tasks restored. Generators
    continue from their saved state.

    Raises NoCheckpoint if `path` has none. Raises CheckpointError inside traced code, with a table for differences that
    are not allowed, or if the checkpoint keeps being replaced during the read; DamagedCheckpoint for a damaged
    array or manifest, which it names.
    """
    given: Any = ignore
    if isinstance(given, str) or not set(given) <= set(DIFFERENCES):
        raise CheckpointError(f"restore was given ignore={ignore!r}", f"give it some of {list(DIFFERENCES)}")
    place = given_place(path, "restore")
    named = named_variables(variables, names, "restore")
    return restore_named(place, named, ignore if strict else DIFFERENCES)


def restore_named(
    place: Place,
    named: Mapping[str, NamedVariable],
    ignore: Collection[str] = (),
    of: Callable[[StateBackend], bool] = lambda backend: True,
) -> RestoreReport:
    """As `restore`, for the variables of those backends that are `of` it; all are compared with the checkpoint."""
    for _ in range(_ATTEMPTS):
        files = open_arrays(place)
        report = _compared(files, named)
        if refused := report.refused(ignore):
            raise CheckpointError(_differs(files, report, refused))
        restored = {name: named[name].variable for name in report.restored}
        if _restored(files, restored, of):
            use_beside_namesakes(restored.values())
            return report
    raise CheckpointError(
        f"{place} was replaced {_ATTEMPTS} times while it was read",
        "save less often to one path, or to a new path each time",
    )


@dataclass(frozen=True)
class NamedVariable:
    """A variable to save or restore, under its default array name; `impl` is a generator's algorithm, or empty."""

    variable: Variable
    name: str
    impl: str = ""


@contextmanager
def captured(
    named: Mapping[str, NamedVariable],
    *,
    is_tree: bool = False,
    channel: str = "program",
    timeout_s: float | None = None,
) -> Iterator[WriteCheckpoint]:
    """Take the values at one moment; the context gives a function that writes them and the manifest into a folder.

    Steps may run meanwhile. The function and the exit may be on another thread; it also takes further metadata.
    `is_tree` is as for `make_places`. `channel` and `timeout_s` are as for `save_together`.
    """
    types = {name: entry.variable.type.strong for name, entry in named.items()}
    group = group_of(entry.variable for entry in named.values())
    # What this process has alone, or tasks have, is as rank 0 has it.
    mine = named if group is None or group.rank == 0 else _of_group(named)
    with ExitStack() as stack:
        parts = [stack.enter_context(backend.capturing(here)) for backend, here in _by_backend(mine).items()]

        def make(folder: Place) -> dict[str, str]:
            return make_places(folder, types, is_tree=is_tree)

        def write_all(folder: Place, places: Mapping[str, str]) -> None:
            for write_part in parts:
                write_part(folder, places)

        def write(opened: AbstractContextManager[Place], metadata: Mapping[str, Any]) -> None:
            def finish(folder: Place, places: Mapping[str, str]) -> None:
                write_manifest(folder, types, places, {**_generators(named), **metadata})

            if group is not None:
                save_together(group, channel, opened, make, write_all, finish, timeout_s)
                return
            with opened as folder:
                places = make(folder)
                write_all(folder, places)
                finish(folder, places)

        yield write


def _of_group(named: Mapping[str, NamedVariable]) -> dict[str, NamedVariable]:
    return {name: entry for name, entry in named.items() if is_of_group(entry.variable)}


def _values(named: Mapping[str, NamedVariable]) -> dict[str, jax.Array]:
    """Return the values at one moment (on a cluster: one moment per task), brought to this process."""
    found: dict[str, jax.Array] = {}
    for backend, here in _by_backend(named).items():
        found.update(zip(here, backend.snapshot([*here.values()]), strict=True))
    return found


def _by_backend(named: Mapping[str, NamedVariable]) -> dict[StateBackend, dict[str, Variable]]:
    return by_backend({name: entry.variable for name, entry in named.items()})


def _generators(named: Mapping[str, NamedVariable]) -> dict[str, dict[str, str]]:
    """Return the metadata with the algorithm of each generator."""
    return {"generators": {name: entry.impl for name, entry in named.items() if entry.impl}}


def named_variables(tree: Any, names: Names | None, task: str) -> dict[str, NamedVariable]:
    """Return the entries of all variables in `tree`, by array name."""
    if is_tracing():
        raise CheckpointError(
            f"{task} is called inside traced code, which runs once, not once a step",
            "call it between steps, or in another thread",
        )
    named: dict[str, NamedVariable] = {}
    called: dict[Variable, str] = {}
    for entry in _entries(tree, task):
        variable = entry.variable
        name = called.setdefault(variable, _array_name(entry.name, names))
        if name in named and named[name].variable is not variable:
            raise CheckpointError(
                f"two variables would be the array {name!r}: {named[name].variable!r}{at(named[name].variable.loc)}\n"
                f"  and {variable!r}{at(variable.loc)}\n  give one of them another name, or say names="
            )
        if name not in named or entry.impl:
            named[name] = entry
    _check_used(named, names, task)
    return named


def _check_used(named: Mapping[str, NamedVariable], names: Names | None, task: str) -> None:
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


def _entries(tree: Any, task: str) -> Iterator[NamedVariable]:
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
                yield NamedVariable(leaf.key, _name_of(path, leaf.key, "generator", task), leaf.impl)
            case Variable():
                yield NamedVariable(leaf, _name_of(path, leaf, "variable", task))
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


def _slots(path: _Path, optimizer: Optimizer, task: str) -> Iterator[NamedVariable]:
    flat, _ = jax.tree_util.tree_flatten_with_path(optimizer.slots, is_leaf=is_variable)
    prefix = _name_of(path, optimizer, "optimizer", task) if flat else ""
    for inner, slot in flat:
        yield NamedVariable(slot, slot.name if slot.is_named else f"{prefix}/{path_name(inner)}")


def _name_of(path: _Path, held: Variable | Optimizer, kind: str, task: str) -> str:
    """Return the name passed by the user, or else the path: a generated name may differ in another program."""
    if held.is_named:
        return held.name
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


def _compared(files: SavedArrays, named: Mapping[str, NamedVariable]) -> RestoreReport:
    impls = _implementations(files)
    changed = {}
    for name, entry in named.items():
        saved, held = files.types.get(name), entry.variable.type
        # A plain variable may be restored from a generator of any algorithm.
        impl = impls.get(name, "") if entry.impl else ""
        if saved is not None and (saved != held or impl not in ("", entry.impl)):
            changed[name] = _described(saved, impl), _described(held, entry.impl)
    return RestoreReport(
        restored=tuple(name for name in named if name in files.types and name not in changed),
        missing={name: str(entry.variable.type) for name, entry in named.items() if name not in files.types},
        unexpected={name: str(type) for name, type in files.types.items() if name not in named},
        changed=changed,
    )


def _implementations(files: SavedArrays) -> dict[str, str]:
    """Return the algorithm of each saved generator, by array name. Raises CheckpointError for damaged metadata."""
    try:
        return msgspec.convert(files.metadata.get("generators", {}), dict[str, str])
    except msgspec.ValidationError as error:
        raise damaged(files.path, f"generators: {error}") from error


def _described(type: ArrayType, impl: str) -> str:
    return f"{type} of {impl}" if impl else str(type)


def _restored(files: SavedArrays, variables: Mapping[str, Variable], of: Callable[[StateBackend], bool]) -> bool:
    """Read and set the variables. Return False, with nothing set, if the checkpoint was replaced meanwhile."""
    with ExitStack() as stack:
        try:
            settings = [
                stack.enter_context(backend.restoring(files, here))
                for backend, here in by_backend(variables).items()
                if of(backend)
            ]
        except CheckpointError:
            if not files.is_replaced():
                raise
            return False
        if files.is_replaced():
            return False
        for set_all in settings:
            set_all()
    return True


def _differs(files: SavedArrays, report: RestoreReport, refused: list[str]) -> str:
    return (
        f"{files.path} and the variables differ, and nothing is restored{at(caller())}\n{report}\n"
        f"  to restore the arrays that fit, call dflow.restore with ignore={refused!r}; "
        "where names differ alone, give names="
    )
