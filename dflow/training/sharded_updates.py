"""Whether a transformation updates the shards of an array as it would the whole.

One that treats elements or rows alike does. One that computes something of a whole array, such as the norms of LAMB and
LARS, the factors of Adafactor or the noise of `noisy_sgd`, is run so that it does (`whole_updates`), if its ops allow
it. Both are found by a trial on small arrays. For others the result depends on the number of shards: a warning.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.shard_layout import ShardLayout
from dflow.tables.sharded_variable import unflattened
from dflow.tracing.source import at, caller
from dflow.training.whole_updates import as_whole, is_sharded

#: Most rows of a shard, and size of other dimensions, in the trial: Adafactor leaves dimensions below 128 alone.
_ROWS = _OTHERS = 130
_STEPS = 2
#: Largest difference of updates that is rounding, relative to the largest update.
_ROUNDING = 1e-4


class ShardedUpdateWarning(UserWarning):
    """An optimizer treats each shard of a sharded variable as a separate array; the message names the variable."""


def on_shards(transformation: Any, variables: Any) -> Any:
    """Return a transformation that updates sharded variables as the given one updates whole arrays.

    It is the given transformation if that does so already, or cannot be tried (it takes arguments beside gradients, or
    is tied to the structure). It is also the given one, with a ShardedUpdateWarning, if that can only treat each shard
    as a separate array.
    """
    leaves = jax.tree_util.tree_leaves(variables, is_leaf=is_sharded)
    if not any(is_sharded(leaf) and leaf.layout.shards > 1 for leaf in leaves):
        return transformation
    whole = _trained(transformation, variables, True)
    if whole is None:
        return transformation
    apart = _first_apart(leaves, whole, _trained(transformation, variables, False))
    if apart is None:
        return transformation
    exact = as_whole(transformation)
    if _first_apart(leaves, whole, _trained(exact, variables, False)) is None and _is_possible(exact, variables):
        return exact
    warnings.warn(
        f"sharded variable {apart.name!r}: its optimizer treats each of {apart.layout.shards} shards as a separate "
        f"array, so the result depends on their number{at(caller())}\n"
        "  use a transformation that treats rows alike, such as optax.adagrad or optax.adam, or one shard",
        ShardedUpdateWarning,
        stacklevel=2,
    )
    return transformation


def _trained(transformation: Any, variables: Any, is_whole: bool) -> list[Any] | None:
    """Return the updates of a few steps on small arrays, whole or in shards; None if it cannot be tried."""
    draw = np.random.default_rng(0)
    drawn = [_drawn(leaf, draw) for leaf in jax.tree_util.tree_leaves(variables, is_leaf=is_sharded)]

    def tree(drawn: Any, step: int) -> Any:
        arrays = iter(drawn)
        return jax.tree_util.tree_map(
            lambda leaf: _filled(leaf, next(arrays)[step], is_whole), variables, is_leaf=is_sharded
        )

    def trained(drawn: Any) -> list[Any]:
        parameters, found = tree(drawn, 0), []
        state = transformation.init(parameters)
        for step in range(1, _STEPS + 1):
            updates, state = transformation.update(tree(drawn, step), state, parameters)
            parameters = jax.tree_util.tree_map(lambda value, update: value + update, parameters, updates)
            leaves = jax.tree_util.tree_leaves(updates, is_leaf=is_sharded)
            found.append([leaf.read() if is_sharded(leaf) else leaf for leaf in leaves])
        return found

    try:
        return list(zip(*jax.jit(trained, compiler_options=_quickly())(drawn), strict=True))
    except Exception:  # of any kind: each transformation has an error class for arguments that it does not take
        return None


def _quickly() -> dict[str, Any]:
    """Options of XLA for a program that runs once: on a CPU, its compilation takes longer than its slowest run."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def _first_apart(variables: Any, whole: list[Any], shards: list[Any] | None) -> Any:
    """Return the first sharded variable that is updated in shards otherwise than whole; None if all are alike."""
    for number, variable in enumerate(variables):
        if is_sharded(variable) and (shards is None or not all(map(_are_alike, whole[number], shards[number]))):
            return variable
    return None


def _are_alike(one: Any, other: Any) -> bool:
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    return np.allclose(one, other, rtol=_ROUNDING, atol=_ROUNDING * float(np.max(np.abs(one), initial=0)))


def _is_possible(exact: Any, variables: Any) -> bool:
    """Whether the shapes of these variables allow it too: Adafactor has no factors for small shards."""
    structs = jax.tree_util.tree_map(lambda variable: variable.type.struct, variables)
    try:
        jax.eval_shape(lambda tree: exact.update(tree, exact.init(tree), tree), structs)
    except Exception:  # NotOnPartsError, and the transformation's own
        return False
    return True


def _drawn(leaf: Any, draw: np.random.Generator) -> list[Any]:
    """A value and gradients of a few rows and columns, in as many parts as the variable has shards."""
    layout = leaf.layout if is_sharded(leaf) else None
    sizes = [min(size, _OTHERS) for size in leaf.shape]
    if layout is not None:
        sizes[layout.axis] = min(layout.size, _ROWS * layout.shards)
    return [draw.normal(size=sizes).astype(np.float32) for _ in range(_STEPS + 1)]


def _filled(leaf: Any, array: Any, is_whole: bool) -> Any:
    array = jnp.asarray(array, leaf.dtype)
    if not is_sharded(leaf):
        return array
    layout = ShardLayout(array.shape, 1 if is_whole else leaf.layout.shards, leaf.layout.by)
    parts = [layout.part(shard).of(array) for shard in range(layout.shards)]
    return unflattened(type(leaf), (layout, leaf.name), parts)
