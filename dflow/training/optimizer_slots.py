"""The slots of an optimizer: a variable for each array of its transformation's state, beside its parameter.

A slot that does not depend on the parameters, such as a zero momentum, is made by ops where its variable lives, rather
than computed here and sent. Slots with the same initial value, as most have, share one initialiser, which is traced
once.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.programs.initial_ops import InitialOps
from dflow.lowering.programs.shared_exports import computation
from dflow.tables.initial_part import initial_part
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.path_names import path_name
from dflow.tracing.rare_collections import rare_collections
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.state.container import uncontained
from dflow.tracing.state.initial_value import TypedInitial
from dflow.tracing.state.resources import Variable, is_variable, read
from dflow.tracing.state.variable_trees import structure_text

#: A path in a pytree.
_Path = tuple[Any, ...]


class OptimizerSlots:
    """The slots of a transformation for `parameters`, a pytree of variables.

    name      prefix of the slots' names
    is_named  whether the user gave it
    """

    @rare_collections()
    def __init__(
        self, transformation: optax.GradientTransformation, parameters: Any, name: str, is_named: bool
    ) -> None:
        self._transformation, self._parameters = transformation, parameters
        paths, _ = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_variable)
        at = dict(paths)
        state = jax.eval_shape(transformation.init, structs_of(parameters))
        flat, tree = jax.tree_util.tree_flatten_with_path(state)
        #: The variable that each slot belongs to, if to one.
        self._owners = owners = _owners_of(transformation, state, at)
        graph = trace(self._initial, (), {}).graph
        initials = _initials_of(graph, lambda: jax.tree_util.tree_leaves(self._initial()))
        with contextlib.ExitStack() as stack:
            for home in {variable.home for variable in at.values()}:
                stack.enter_context(home.together())
            slots = [
                Variable(initial, name=f"{name}/{_slot_name(path, owner, at)}", near=owner)
                for (path, _), owner, initial in zip(flat, owners, initials, strict=True)
            ]
        for slot, owner in zip(slots, owners, strict=True):
            slot.is_named = is_named and (owner is None or owner.is_named)
        _divide([path[:-1] for path, _ in flat], slots, owners)
        #: By parameter: the further bits that its optimizer keeps of it, see `StochasticRounding`.
        self.low_bits: Mapping[Variable, Variable] = {}
        #: The transformation's state, with variables for arrays.
        self.state = jax.tree_util.tree_unflatten(tree, slots)

    def _initial(self) -> Any:
        return self._transformation.init(read(self._parameters))

    def values_in(self, state: Any) -> list[Any]:
        """Return the arrays of a new state in the order of the slots. Raises GraphTypeError for another structure."""
        values, given = jax.tree_util.tree_flatten(state)
        tree: Any = jax.tree_util.tree_structure(self.state, is_leaf=is_variable)
        if given != tree:
            raise GraphTypeError(
                f"the transformation's state: expected the structure that init gave it, {structure_text(tree)}, got "
                f"{structure_text(given)}",
                "give the optimizer a transformation whose update keeps the structure of its state",
            )
        return values

    def assign(self, values: Sequence[Any], masks: Mapping[Variable, Any]) -> None:
        """Assign new values; of the slots of a variable in `masks`, the rows where the mask is true."""
        slots = jax.tree_util.tree_leaves(self.state, is_leaf=is_variable)
        for slot, owner, value in zip(slots, self._owners, values, strict=True):
            mask = None if owner is None else masks.get(owner)
            # Of another slot, such as a norm, other rows change each element.
            if mask is not None and slot.ndim == mask.ndim and slot.shape[:1] == mask.shape[:1]:
                value = jnp.where(mask, value, slot.read())
            slot.assign(value)

    def initial_rows(self, variable: Variable, rows: Any) -> list[tuple[Variable, Any]]:
        """Return the slots that have rows of a variable, each with its initial rows for those of the variable.

        Raises VariableError for a slot of the variable that has no row for each of the variable's.
        """
        parameters = jax.tree_util.tree_map(
            lambda one: rows if one is variable else jnp.zeros(one.shape, one.dtype),
            self._parameters,
            is_leaf=is_variable,
        )
        initial = jax.tree_util.tree_leaves(self._transformation.init(parameters))
        slots = jax.tree_util.tree_leaves(self.state, is_leaf=is_variable)
        found = zip(slots, self._owners, initial, strict=True)
        own = [(slot, value) for slot, owner, value in found if owner is variable]
        for slot, value in own:
            if slot.shape[:1] != variable.shape[:1] or value.shape != (*rows.shape[:1], *slot.shape[1:]):
                raise VariableError(
                    f"slot {slot.name!r} of {slot.shape}: expected a row for each of {variable.name!r}, whose rows "
                    f"begin again for other ids",
                    "take a transformation that treats rows alike, such as optax.adagrad or optax.adam",
                )
        low = self.low_bits.get(variable)
        return own if low is None else [*own, (low, jnp.zeros((*rows.shape[:1], *low.shape[1:]), low.dtype))]


def structs_of(tree: Any) -> Any:
    """Return the pytree with the shape and dtype of each variable in its place."""
    return jax.tree_util.tree_map(lambda variable: variable.type.struct, tree, is_leaf=is_variable)


def _slot_name(path: _Path, owner: Variable | None, at: Mapping[_Path, Variable]) -> str:
    """Return the path in the state, with the owner's name in place of the owner's path: `0/mu/dense/kernel`."""
    if owner is None:
        return path_name(path)
    inner = next(end for end in _suffixes(path) if at.get(end) is owner)
    return path_name((*path[: len(path) - len(inner)], jax.tree_util.DictKey(uncontained(owner.name))))


def _owners_of(transformation: Any, state: Any, at: Mapping[_Path, Variable]) -> list[Variable | None]:
    """Return, for each array of the state, the variable that it belongs to, as far as optax knows.

    That is the variable whose path in the parameters ends the array's path; the longest such path counts.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    owners = [next((at[end] for end in _suffixes(path) if end in at), None) for path, _ in flat]
    marks = _parameter_marks(transformation, state)
    if marks is None:
        marks = [
            owner is not None and leaf.shape[leaf.ndim - owner.ndim :] == owner.shape
            for owner, (_, leaf) in zip(owners, flat, strict=True)
        ]
    return [owner if marked else None for owner, marked in zip(owners, marks, strict=True)]


def _parameter_marks(transformation: Any, state: Any) -> list[bool] | None:
    """Return, for each array of the state, whether it is like a parameter; None where optax cannot tell.

    optax calls `init` with placeholders to tell. `init` of `optax.lbfgs` and `optax.flatten` needs arrays.
    """
    try:
        marked = optax.tree_utils.tree_map_params(
            transformation, lambda _: True, state, transform_non_params=lambda _: False
        )
    except Exception:  # of any kind: a foreign `init` fails in its own way
        return None
    marks: list[bool] = jax.tree_util.tree_leaves(marked)
    return marks


def _divide(tables: Sequence[_Path], slots: Sequence[Variable], owners: Sequence[Variable | None]) -> None:
    """Have the slots of a sharded variable divide an array as the shards do, if all have the shapes of their shards.

    tables  for each slot, the path in the state that leads to those of all shards
    """
    found: dict[_Path, list[tuple[Variable, Variable]]] = defaultdict(list)
    for table, slot, owner in zip(tables, slots, owners, strict=True):
        if owner is not None and owner.part is not None:
            found[table].append((slot, owner))
    for pairs in found.values():
        if all(slot.shape == owner.shape for slot, owner in pairs):
            for slot, owner in pairs:
                slot.part = owner.part


def _suffixes(path: _Path) -> Iterator[_Path]:
    """Yield every suffix of a path, the longest first."""
    return (path[first:] for first in range(len(path) + 1))


class _Computed(TypedInitial):
    """An initial value that depends on the parameters, computed from their values on demand.

    Not within a trace: all slots share what was computed, and a value of one trace has no meaning outside of it. Raises
    VariableError there, so that the value is computed and then moved to the devices of the slot.
    """

    def __init__(self, type: ArrayType, value: Callable[[], Any]) -> None:
        self.type, self._value = type, value

    def __call__(self) -> Any:
        if is_tracing():
            raise VariableError(f"the initial value of a slot of {self.type} is computed from variables, not traced")
        return self._value()


def _initials_of(graph: Graph, values: Callable[[], Sequence[Any]]) -> list[TypedInitial]:
    """Return the initialiser of each output of a graph. `values` computes all outputs, if one is needed by value."""
    made_by = {value: (position, node) for position, node in enumerate(graph.nodes) for value in node.outputs}
    # An entry keeps its program alive, because parts of the key are identities of the objects that it holds.
    shared: dict[Hashable, tuple[Discharged, InitialOps]] = {}
    once = functools.cache(values)

    def initial(position: int, output: Operand) -> TypedInitial:
        type = output.type
        assert isinstance(type, ArrayType)
        nodes = _behind(output, made_by)
        if nodes is None:
            return _Computed(type.strong, lambda: once()[position])
        pure = discharge(Graph((), tuple(nodes), (output,)))
        key = output if (found := computation(pure)) is None else found
        if key not in shared:
            shared[key] = pure, _ops(lambda: pure.fn()[0] if nodes else jnp.asarray(pure.fn()[0], type.dtype), type)
        return shared[key][1]

    return [initial(position, output) for position, output in enumerate(graph.outputs)]


def _ops(initial: Callable[[], Any], type: ArrayType) -> InitialOps:
    """Return the ops of an initialiser of a type: of a large value in blocks of rows, if rows can be made so."""
    if not type.shape or not type.shape[0]:
        return InitialOps(initial)
    found = initial_part(initial, AxisSlice(0, 0, type.shape[0]), type.size_bytes // type.shape[0], None)
    return found if isinstance(found, InitialOps) else InitialOps(initial)


def _behind(output: Operand, made_by: Mapping[Value, tuple[int, Node]]) -> Sequence[Node] | None:
    """Return the nodes that compute an output, in order; None if one of them depends on an input of the graph."""
    found: dict[int, Node] = {}
    wanted = [output]
    while wanted:
        value = wanted.pop()
        if isinstance(value, Literal):
            continue
        if value not in made_by:
            return None
        position, node = made_by[value]
        if position not in found:
            found[position] = node
            wanted += [*node.inputs, *node.values]
    return [found[position] for position in sorted(found)]
