"""The gradients of a step for the variables that each process of a group has for itself: all apply their mean.

In the step the gradients go into variables of this process. After it, a collective gives their mean to all processes,
and each updates its own variables by that. All begin with the same values, so they stay the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflow.distributed.strategies.applying import GivenOptimizer, is_own
from dflow.lowering.state_backend import StateBackend
from dflow.tracing.errors import StrategyError
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.rows.row_gradient import is_row_gradient
from dflow.tracing.state.context import default_home, home
from dflow.tracing.state.resources import Variable, is_variable

_serials = itertools.count()


class DenseGradients:
    """Receives gradients in a step, and applies their means. Made once for a strategy."""

    def __init__(self) -> None:
        self.name = f"dense gradients {next(_serials)}"
        #: By optimizer: the tree of the arrays from `Optimizer.apply`, and a variable of this process for each array.
        self._kept: dict[GivenOptimizer, tuple[Any, list[Variable]]] = {}
        self._updates: dict[GivenOptimizer, Callable[[Sequence[Any]], Any]] = {}
        #: The optimizers of the step that runs.
        self._given: list[GivenOptimizer] = []

    def takes(self, optimizer: GivenOptimizer) -> bool:
        """Whether the optimizer's variables are in this process. Raises StrategyError if only some of them are."""
        variables = jax.tree_util.tree_leaves(optimizer.variables, is_leaf=is_variable)
        own = [variable for variable in variables if is_own(variable)]
        if own and len(own) < len(variables):
            other = next(variable for variable in variables if not is_own(variable))
            raise StrategyError(
                f"{optimizer.name!r} has variable {own[0].name!r} in this process and {other.name!r} on {other.device}",
                "make one optimizer for the variables on parameter tasks, and another one for the rest",
            )
        return bool(own)

    def use(self, found: Sequence[tuple[GivenOptimizer, Any]]) -> None:
        """Prepare for a step that gives these optimizers gradients of these types."""
        self._given = [optimizer for optimizer, _ in found]
        for optimizer, types in found:
            leaves, tree = jax.tree_util.tree_flatten(_dense(types))
            if optimizer not in self._kept or _differ(self._kept[optimizer], tree, leaves):
                self._updates.pop(optimizer, None)
                with home(default_home()):
                    made = [
                        Variable(jnp.zeros(leaf.shape, leaf.dtype), name=f"{self.name}/{optimizer.name}/{number}")
                        for leaf, number in zip(leaves, _serials, strict=False)
                    ]
                self._kept[optimizer] = tree, made

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Keep the gradients of the step, in traced code."""
        _, kept = self._kept[optimizer]
        for variable, gradient in zip(kept, jax.tree_util.tree_leaves(_dense(gradients)), strict=True):
            variable.assign(gradient)

    def apply_means(self) -> None:
        """Update the variables by the means of the gradients of all processes, which all call this after a step."""
        values = [variable.home.read(variable) for one in self._given for variable in self._kept[one][1]]
        means = iter(_means(values))
        for optimizer in self._given:
            tree, kept = self._kept[optimizer]
            own = tuple(next(means) for _ in kept)
            if optimizer not in self._updates:
                self._updates[optimizer] = _update(optimizer, tree, own)
            self._updates[optimizer](own)


def _differ(kept: tuple[Any, list[Variable]], tree: Any, leaves: Sequence[Any]) -> bool:
    """Whether arrays of another structure or type are kept."""
    types = [(variable.shape, variable.dtype) for variable in kept[1]]
    return kept[0] != tree or types != [(leaf.shape, leaf.dtype) for leaf in leaves]


def _update(optimizer: GivenOptimizer, tree: Any, means: tuple[Any, ...]) -> Callable[[Sequence[Any]], Any]:
    """Return the compiled update of an optimizer's variables by the arrays of `tree`."""
    traced = trace(lambda *leaves: optimizer.apply_mean(tree.unflatten(leaves)), means, {})
    return cast(StateBackend, default_home()).runner(traced, check=False, observe=None)


def _dense(gradients: Any) -> Any:
    """Return gradients, or their types, without rows."""

    def dense(part: Any) -> Any:
        if not is_row_gradient(part):
            return part
        is_type = isinstance(part.rows, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(part.shape, part.rows.dtype) if is_type else part.dense()

    return jax.tree_util.tree_map(dense, gradients, is_leaf=is_row_gradient)


def _means(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the means over all processes of arrays that each of them has, in this process."""
    count = jax.process_count()
    if count == 1:
        return [*values]
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in range(count)]), ("process",))
    here, by_process = firsts[jax.process_index()], NamedSharding(mesh, PartitionSpec("process"))
    stacked = [
        jax.make_array_from_single_device_arrays((count, *value.shape), by_process, [jax.device_put(value[None], here)])
        for value in values
    ]
    return [mean.addressable_data(0) for mean in _mean_program(NamedSharding(mesh, PartitionSpec()))(stacked)]


_programs: dict[NamedSharding, Callable[[Sequence[jax.Array]], list[jax.Array]]] = {}


def _mean_program(sharding: NamedSharding) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    if sharding not in _programs:
        _programs[sharding] = jax_jit(lambda stacked: [jnp.mean(one, 0) for one in stacked], out_shardings=sharding)
    return _programs[sharding]
