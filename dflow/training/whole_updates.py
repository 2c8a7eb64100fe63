"""A transformation that updates arrays in shards as it would update whole arrays.

`update` is traced for the whole arrays, and run on their shards: norms and factors of a whole array are sums over its
shards (`cut_arrays`). A part of the optimizer's state with a row for each row of the array is divided like the array.
Other parts, such as the factor of Adafactor for the columns, are the same in the slots of all shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from dflow.tables.shard_layout import ShardLayout
from dflow.tables.sharded_variable import ShardedVariable, unflattened
from dflow.tracing.jax_frontend import make_jaxpr
from dflow.training.cut_arrays import Cut, NotOnPartsError, beside, run_on_parts


def as_whole(transformation: Any) -> optax.GradientTransformationExtraArgs:
    """Return the transformation for pytrees with sharded variables. Its `update` may raise NotOnPartsError.

    With extra arguments, and for gradients of other shapes than the variables', each shard is a separate array.
    """

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if extra or params is None or _shapes(gradients) != _shapes(params):
            return transformation.update(gradients, state, params, **extra)
        whole = jax.tree_util.tree_map(_whole_type, params, is_leaf=_has_parts)
        whole_state = jax.eval_shape(transformation.init, whole)
        given = [*_leaves(gradients), *_leaves(state), *_leaves(params)]
        types = [*_leaves(whole), *jax.tree_util.tree_leaves(whole_state), *_leaves(whole)]
        if len(types) != len(given):
            raise NotOnPartsError("the state")
        # The types of the gradients, whose dtypes may differ from the parameters'.
        structs = [jax.ShapeDtypeStruct(type.shape, _dtype(one)) for type, one in zip(types, given, strict=True)]
        trees: list[Any] = [jax.tree_util.tree_structure(tree) for tree in (whole, whole_state)]
        counts = [tree.num_leaves for tree in trees]

        def flat(*leaves: Any) -> Any:
            one, two = counts[0], counts[0] + counts[1]
            return transformation.update(
                trees[0].unflatten(leaves[:one]),
                trees[1].unflatten(leaves[one:two]),
                trees[0].unflatten(leaves[two:]),
            )

        jaxpr, consts, _ = make_jaxpr(flat, *structs)
        values = [_value(one, type) for one, type in zip(given, types, strict=True)]
        results = run_on_parts(jaxpr, consts, values)
        updates, after = results[: counts[0]], results[counts[0] :]
        return _rebuilt(gradients, updates), _rebuilt(state, after)

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def is_sharded(value: Any) -> bool:
    """Whether a node of a pytree is a sharded variable, or like one."""
    return isinstance(value, ShardedVariable)


def _has_parts(value: Any) -> bool:
    """Whether a node has an array for each shard; a transformation may put something else there, such as no leaf."""
    return is_sharded(value) and jax.tree_util.all_leaves(value.shards)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves(tree, is_leaf=_has_parts)


def _shapes(tree: Any) -> list[Any]:
    return [jax.numpy.shape(leaf) for leaf in jax.tree_util.tree_leaves(tree)]


def _whole_type(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.layout.shape if is_sharded(leaf) else jax.numpy.shape(leaf), _dtype(leaf))


def _dtype(leaf: Any) -> Any:
    return jax.numpy.result_type(leaf.shards[0] if is_sharded(leaf) else leaf)


def _value(leaf: Any, type: Any) -> Any:
    """The argument of the program: an array, or the parts of one. Raises NotOnPartsError."""
    if not is_sharded(leaf):
        return leaf
    axis = _axis(leaf.layout, leaf.shards, type.shape)
    return leaf.shards[0] if axis is None else Cut(tuple(leaf.shards), axis, leaf.layout)


def _axis(layout: ShardLayout, parts: Sequence[Any], whole: tuple[int, ...]) -> int | None:
    """The dimension along which parts divide an array; None if each of them is the array."""
    shapes = [jax.numpy.shape(part) for part in parts]
    if layout.shards == 1:
        return None
    for axis, size in enumerate(whole):
        slices = [layout.part(shard)._replace(axis=axis) for shard in range(layout.shards)]
        if size == layout.size and shapes == [part.shape(whole) for part in slices]:
            return axis
    if any(shape != whole for shape in shapes):
        raise NotOnPartsError(f"parts of {shapes} of an array of {whole}")
    return None


def _rebuilt(tree: Any, values: Sequence[Any]) -> Any:
    """The pytree with these values, each divided as the leaf in its place. Raises NotOnPartsError."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=_has_parts)
    made = [_as_leaf(leaf, value) for leaf, value in zip(leaves, values, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, made)


def _as_leaf(leaf: Any, value: Any) -> Any:
    if not is_sharded(leaf):
        if isinstance(value, Cut):
            raise NotOnPartsError("a result")
        return value
    layout = leaf.layout
    shape = tuple(value.layout.shape) if isinstance(value, Cut) else jax.numpy.shape(value)
    axis = value.axis if isinstance(value, Cut) else _axis(layout, leaf.shards, shape)
    if axis is None:
        parts = (value,) * layout.shards
    else:
        like = Cut(tuple(leaf.shards), axis, layout)
        parts = tuple(beside(value, like, shard) for shard in range(layout.shards))
    return unflattened(type(leaf), (layout, leaf.name), parts)
