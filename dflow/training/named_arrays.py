"""The arrays that a program's state is saved as, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from dflow.lowering.files.narrowed_weights import narrowed_type
from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.state_backend import SavedVariables, StateBackend, indices_of
from dflow.state_backends import by_backend
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.path_names import path_name
from dflow.tracing.rows.slices import have_each_once
from dflow.tracing.source import at
from dflow.tracing.state.container import resources_in
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.resources import Variable, is_variable
from dflow.training.generator import Generator
from dflow.training.group_saving import is_divided
from dflow.training.optimizer import Optimizer

#: Array names that differ from the variables' names: a mapping or function from variable name to array name, or pairs
#: of a regular expression and what replaces each match of it in a variable's name, applied one after another.
Names = Mapping[str, str] | Callable[[str], str] | Sequence[tuple[str, str]]

_Path = tuple[Any, ...]


@dataclass(frozen=True)
class NamedArray:
    """An array to save or restore under its default name; `impl` is a generator's algorithm, or empty.

    `variables`  the variable, or the variables that divide the array, in the order of their indices
    `narrowing`  what of one variable is saved, in fewer bits; None for the variable as it is
    """

    variables: tuple[Variable, ...]
    name: str
    impl: str = ""
    narrowing: Narrowing | None = None

    @property
    def type(self) -> ArrayType:
        """The type of the array."""
        first = self.variables[0]
        if self.narrowing is not None:
            return narrowed_type(first.type, self.narrowing)
        return first.type if first.part is None else replace(first.type, shape=first.part.whole)


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
    given: Any = name
    if callable(names):
        given = names(name)
    elif isinstance(names, Mapping):
        given = names.get(name, name)
    elif names is not None:
        given = _replaced(name, names)
    if not isinstance(given, str):
        raise CheckpointError(f"names gives {given!r} for variable {name!r}, a {type(given).__name__}", "give a string")
    return given


def _replaced(name: str, pairs: Sequence[tuple[str, str]]) -> str:
    for pair in pairs:
        try:
            pattern, replacement = pair
            name = re.sub(pattern, replacement, name)
        except (TypeError, ValueError, re.error) as error:
            raise CheckpointError(
                f"names: expected pairs of a regular expression and a replacement, got {pair!r}: {error}",
                "write a list such as [(r'/', '.'), (r'kernel$', 'weight')]",
            ) from None
    return name


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
    prefix = _name_of(path, optimizer, "optimizer", task) if flat or optimizer.rounding else ""
    for inner, slot in flat:
        yield NamedArray((slot,), _array_of(slot) if slot.is_named else f"{prefix}/{path_name(_path_of(inner, slot))}")
    if optimizer.rounding is not None:
        updates = optimizer.rounding.updates
        yield NamedArray((updates,), updates.name if updates.is_named else f"{prefix}/rounded_updates")
        arrays = [*dict.fromkeys(map(_array_of, optimizer.rounding.low))]
        for parameter, low in optimizer.rounding.low.items():
            number = arrays.index(_array_of(parameter))
            yield NamedArray((low,), _array_of(low) if low.is_named else f"{prefix}/low_bits/{number}")


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


def variables_of(named: Mapping[str, NamedArray]) -> Iterator[Variable]:
    return (variable for entry in named.values() for variable in entry.variables)


def arrays_by_backend(named: Mapping[str, NamedArray]) -> dict[StateBackend, SavedVariables]:
    # The variables of one array have one home.
    homes = by_backend({name: entry.variables[0] for name, entry in named.items()})
    return {home: {name: named[name].variables for name in here} for home, here in homes.items()}
