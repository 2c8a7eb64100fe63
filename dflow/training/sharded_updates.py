"""Whether a transformation updates the shards of an array as it would the whole.

One that treats elements or rows alike does. One that computes something of a whole array, such as the norms of LAMB and
LARS or the factors of Adafactor, does it for each shard: the result then depends on the number of shards.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.shard_layout import ShardLayout
from dflow.tables.sharded_variable import ShardedVariable, unflattened
from dflow.tracing.source import at, caller

#: Most rows of a shard, and size of other dimensions, in the trial: Adafactor leaves dimensions below 128 alone.
_ROWS = _OTHERS = 130
_STEPS = 2


class ShardedUpdateWarning(UserWarning):
    """An optimizer treats each shard of a sharded variable as a separate array; the message names the variable."""


def warn_of_shards(transformation: Any, variables: Any) -> None:
    """Warn with ShardedUpdateWarning if small arrays in shards are updated otherwise than whole.

    No warning where the transformation cannot be tried: with arguments beside gradients, or tied to the structure.
    """
    sharded = [leaf for leaf in jax.tree_util.tree_leaves(variables, is_leaf=_is_sharded) if _is_sharded(leaf)]
    if not any(leaf.layout.shards > 1 for leaf in sharded):
        return
    draw = np.random.default_rng(0)
    drawn = [_drawn(leaf, draw) for leaf in jax.tree_util.tree_leaves(variables, is_leaf=_is_sharded)]

    def tree(step: int, is_whole: bool) -> Any:
        arrays = iter(drawn)
        return jax.tree_util.tree_map(
            lambda leaf: _filled(leaf, next(arrays)[step], is_whole), variables, is_leaf=_is_sharded
        )

    def trained(is_whole: bool) -> list[Any]:
        parameters = tree(0, is_whole)
        state = transformation.init(parameters)
        for step in range(1, _STEPS + 1):
            updates, state = transformation.update(tree(step, is_whole), state, parameters)
            parameters = jax.tree_util.tree_map(lambda value, update: value + update, parameters, updates)
        leaves = jax.tree_util.tree_leaves(parameters, is_leaf=_is_sharded)
        return [leaf.read() if _is_sharded(leaf) else leaf for leaf in leaves]

    try:
        whole, shards = jax.jit(lambda: (trained(True), trained(False)))()
    except Exception:  # of any kind: each transformation has an error class for arguments that it does not take
        return
    names = jax.tree_util.tree_leaves(variables, is_leaf=_is_sharded)
    for variable, one, other in zip(names, whole, shards, strict=True):
        if _is_sharded(variable) and not np.allclose(one, other, rtol=1e-4, atol=1e-6):
            warnings.warn(
                f"sharded variable {variable.name!r}: its optimizer treats each of {variable.layout.shards} shards as "
                f"a separate array, so the result depends on their number{at(caller())}\n"
                "  use a transformation that treats rows alike, such as optax.adagrad or optax.adam, or one shard",
                ShardedUpdateWarning,
                stacklevel=2,
            )
            return


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedVariable)


def _drawn(leaf: Any, draw: np.random.Generator) -> list[Any]:
    """A value and gradients of a few rows and columns, in as many parts as the variable has shards."""
    layout = leaf.layout if _is_sharded(leaf) else None
    sizes = [min(size, _OTHERS) for size in leaf.shape]
    if layout is not None:
        sizes[layout.axis] = min(layout.size, _ROWS * layout.shards)
    return [draw.normal(size=sizes).astype(np.float32) for _ in range(_STEPS + 1)]


def _filled(leaf: Any, array: Any, is_whole: bool) -> Any:
    array = jnp.asarray(array, leaf.dtype)
    if not _is_sharded(leaf):
        return array
    layout = ShardLayout(array.shape, 1 if is_whole else leaf.layout.shards, leaf.layout.by)
    parts = [layout.part(shard).of(array) for shard in range(layout.shards)]
    return unflattened(type(leaf), (layout, leaf.name), parts)
