"""The gradients of a step for the variables that each process of a group has for itself: all apply their mean.

In the step the gradients go into variables of this process. After it, a collective gives their mean to all processes,
and each updates its own variables by that. All begin with the same values, so they stay the same. Values that a step
itself writes to such variables, as batch norms write their statistics, are averaged too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.training.applying import GivenOptimizer, is_own
from dflow.lowering.state_backend import StateBackend
from dflow.tracing.errors import StrategyError
from dflow.tracing.ir.wide_sums import sum_dtype
from dflow.tracing.jaxprs.trace import Traced, trace, written_keys
from dflow.tracing.rows.row_gradient import is_row_gradient
from dflow.tracing.state.context import default_home, home
from dflow.tracing.state.resources import Variable, is_variable
from dflow.tracing.syntax.listing import listing
from dflow.tracing.weak_by_identity import WeakDict

_serials = itertools.count()
#: Shape and dtype of each array, and the structure of all.
_Key = tuple[tuple[tuple[tuple[int, ...], Any], ...], Any]


@dataclass
class KeptGradients:
    """The gradients of one step for the variables of an optimizer.

    optimizer  a weak reference to it
    tree       structure of the arrays that `Optimizer.apply` is given
    variables  a variable of this process for each array
    update     compiled update of the optimizer's variables by the means of the arrays; None before the first one
    """

    optimizer: ref[GivenOptimizer]
    tree: Any
    variables: list[Variable]
    update: Callable[[Sequence[Any]], Any] | None = None


#: What a step writes in this process: gradients, and the variables whose new values are averaged.
DenseStep = tuple[Sequence[KeptGradients], Sequence[Variable]]


class DenseGradients:
    """Receives gradients in a step, and applies their means; all strategies of a cluster share what it compiles.

    It keeps the gradients of the newest step for each optimizer and each structure, which the compiled steps write, as
    long as the optimizer lives.
    """

    inlines = is_look = False

    def __init__(self, cluster: Cluster) -> None:
        self._programs = cluster.part(Collectives).programs
        self.name = f"dense gradients {next(_serials)}"
        self._kept: WeakKeyDictionary[GivenOptimizer, dict[_Key, KeptGradients]] = WeakKeyDictionary()
        #: The variables that all processes have copies of.
        self.copies: WeakDict[Variable, None] = WeakDict()
        #: Computes the means, on the processes' first devices.
        self._mean_program: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None

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

    def use(self, found: Sequence[tuple[GivenOptimizer, Any]], traced: Traced | None = None) -> DenseStep:
        """Make the variables that a step writes its gradients to, unless they exist; return what the step writes.

        found   the optimizers, each with the types of its gradients
        traced  the step, without the updates by the optimizers; None for a step that writes no statistics
        """
        written = frozenset[str]() if traced is None else written_keys(traced)
        statistics = [
            one
            for one in (() if traced is None else traced.variables)
            if one.key in written and one in self.copies and jnp.issubdtype(one.dtype, jnp.inexact)
        ]
        return [self._prepared(optimizer, types) for optimizer, types in found], statistics

    def _prepared(self, optimizer: GivenOptimizer, types: Any) -> KeptGradients:
        key = leaves, tree = _key(_dense(types))
        by_key = self._kept.setdefault(optimizer, {})
        if key not in by_key:
            with home(default_home()):
                made = [
                    Variable(jnp.zeros(shape, dtype), name=f"{self.name}/{optimizer.name}/{number}")
                    for (shape, dtype), number in zip(leaves, _serials, strict=False)
                ]
            by_key[key] = KeptGradients(ref(optimizer), tree, made)
        return by_key[key]

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Assign the gradients to the variables that `use` made; called while the step is traced."""
        dense = _dense(gradients)
        kept = self._kept[optimizer][_key(dense)]
        for variable, gradient in zip(kept.variables, jax.tree_util.tree_leaves(dense), strict=True):
            variable.assign(gradient)

    def apply_means(self, step: DenseStep) -> None:
        """Average the gradients and the statistics over all processes, and apply the optimizers.

        Sets the statistics to their means. All processes call it after each step. Raises StrategyError if their
        updates differ.
        """
        gradients, statistics = step
        written = [variable for kept in gradients for variable in kept.variables]
        means = iter(self._means([one.home.read(one) for one in (*written, *statistics)]))
        for kept in gradients:
            own = tuple(next(means) for _ in kept.variables)
            if kept.update is None:
                optimizer = kept.optimizer()
                assert optimizer is not None  # the step has it
                kept.update = self._update(optimizer, kept.tree, own)
            kept.update(own)
        for variable, mean in zip(statistics, means, strict=True):
            variable.home.update(variable, "assign", mean)

    def _update(self, optimizer: GivenOptimizer, tree: Any, means: tuple[Any, ...]) -> Callable[[Sequence[Any]], Any]:
        """Trace and compile the update of an optimizer's variables by the arrays of `tree`; return it.

        Waits for the other processes, which do the same, and raises StrategyError if they have a different update.
        """
        traced = trace(lambda *leaves: optimizer.apply_mean(tree.unflatten(leaves)), means, {})
        if self._programs is not None:
            self._programs.compare(f"the update of {optimizer.name!r}", listing(traced))
        return cast(StateBackend, default_home()).runner(traced, check=False, observe=None)

    def _means(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the means of `values` over all processes, as arrays of this process. All processes call it."""
        count = jax.process_count()
        if count == 1:
            return [*values]
        firsts = {device.process_index: device for device in reversed(jax.devices())}
        mesh = Mesh(np.array([firsts[process] for process in range(count)]), ("process",))
        here, by_process = firsts[jax.process_index()], NamedSharding(mesh, PartitionSpec("process"))
        stacked = [
            jax.make_array_from_single_device_arrays(
                (count, *value.shape), by_process, [jax.device_put(value[None], here)]
            )
            for value in values
        ]
        if self._mean_program is None:
            self._mean_program = jax_jit(
                lambda stacked: list(map(_mean, stacked)),
                out_shardings=NamedSharding(mesh, PartitionSpec()),
            )
        return [mean.addressable_data(0) for mean in self._mean_program(stacked)]


def _mean(stacked: jax.Array) -> jax.Array:
    """Return the mean of the values of all processes; where they are equal, the value without rounding."""
    mean = jnp.mean(stacked, 0, sum_dtype(stacked.dtype)).astype(stacked.dtype)
    return jnp.where(jnp.all(stacked == stacked[:1], 0), stacked[0], mean)


def _dense(gradients: Any) -> Any:
    def dense(part: Any) -> Any:
        if not is_row_gradient(part):
            return part
        is_type = isinstance(part.rows, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(part.shape, part.rows.dtype) if is_type else part.dense()

    return jax.tree_util.tree_map(dense, gradients, is_leaf=is_row_gradient)


def _key(gradients: Any) -> _Key:
    """Return the shapes and dtypes of gradients without rows, or of their types, and their structure."""
    leaves, tree = jax.tree_util.tree_flatten(gradients)
    return tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves), tree
