"""`dflow.ConditionalAccumulator`: sums gradients of several workers, without stale ones.

Staleness and the result of a take follow TensorFlow 1's documentation, with one exception: the mean of row gradients
divides every row by the number of gradients, so that it equals the mean of their dense forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.element_arrays import plain_array
from dflow.tracing.errors import AccumulatorError, GraphTypeError
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S
from dflow.tracing.ir.types import AccumulatorType, ArrayType, RowsType, array_type_of
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.number_range import check_number
from dflow.tracing.path_names import path_name
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.source import caller
from dflow.tracing.state.host_resource import HostResource, known_number, number_text
from dflow.tracing.state.initial_value import converted
from dflow.tracing.state.resources import Variable, is_variable, read


class ConditionalAccumulator(HostResource):
    """Sums the gradients of a step of synchronous training until there are enough. Threads may share it.

    spec       the pytree of a gradient, of arrays, `jax.ShapeDtypeStruct`s or the variables it is for. A `RowGradient`
               of k rows makes its part row-sparse: a take gives k rows, padded with zeros
    name       the name in error messages
    reduction  the result of `take`: the "mean" of the gradients, or their "sum"
    limit      the largest number of gradients in a take; later gradients are dropped like stale ones. None: no limit
    raises     AccumulatorError for another reduction, for the mean of integers, for a limit that is not an integer of
               at least 1, and inside traced code

    It counts steps, beginning at 0. A gradient of an earlier step is stale and dropped. A take waits for `n` gradients,
    returns the reduction of all that are there, and increments the step. In traced code each method records an op, and
    ops on one accumulator run in the order of the program; elsewhere they run immediately.
    """

    kind = "accumulator"
    error = AccumulatorError
    batched_remedy = "apply one gradient, such as the mean over the batch, outside of the vmap, and take outside of it"
    looped_remedy = "take before the loop, and apply after it"
    puts = "apply"
    type: AccumulatorType
    settings: AccumulatorSettings

    @suggests_keywords
    def __init__(
        self, spec: Any, *, name: str | None = None, reduction: str = "mean", limit: int | None = None
    ) -> None:
        super().__init__(name)
        leaves, tree = jax.tree_util.tree_flatten(spec, is_leaf=_is_leaf)
        self._tree: Any = tree
        self.type = AccumulatorType(tuple(map(self._component, leaves)))
        given: Any = limit
        if given is not None and (not isinstance(given, int | np.integer) or given < 1):
            raise AccumulatorError(
                f"{self.title} cannot have the limit {limit!r}",
                "give a number of gradients, from 1, or None",
                at=self.loc,
            )
        self.settings = AccumulatorSettings(self._checked(reduction), None if limit is None else int(limit))
        self.settle()

    def apply(self, gradient: Any, step: Any = 0) -> jax.Array:
        """Add a gradient that was computed in `step`, unless it is stale; return bool[], whether it was added.

        Where the spec is row-sparse, the gradient is a `RowGradient` of any number of rows, or of one index i32[] and
        its row; elsewhere a `RowGradient` is made dense. Raises GraphTypeError for another structure, shape or dtype
        than `spec`'s, and AccumulatorError when the sum would have more different rows than a take can return.
        """
        operands = self._operands(gradient)
        fresh: jax.Array = self.use(ops.accumulator_apply, [*operands, self._number(step)])[0]
        return fresh

    def keep(self, gradient: Any, step: Any = 0) -> jax.Array:
        """Keep a gradient aside, unless it is stale, for `take_kept`; return its ticket, i32[], from 1, or 0 if stale.

        A gradient of a later step than the accumulator's sets the step, and makes the gradients kept before stale.
        """
        ticket: jax.Array = self.use(ops.accumulator_keep, [*self._operands(gradient), self._number(step)])[0]
        return ticket

    def take_kept(self, tickets: Any) -> Any:
        """Return the mean or sum of the kept gradients with these `tickets`, structured as `spec`; drop the others.

        tickets  i32[k], one or more; zeros may follow them, as in the indices of a take
        raises   AccumulatorError if one is no ticket of a kept gradient, or stands twice

        The step becomes the one after that of these gradients.
        """
        given = read(tickets)
        if not jnp.issubdtype(array_type_of(given).dtype, jnp.integer):
            raise AccumulatorError(f"{self.title}: tickets are {array_type_of(given)}, not integers", at=caller())
        return self.structured(self.use(ops.accumulator_take_kept, [jax.lax.convert_element_type(given, np.int32)]))

    def take(self, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Wait until `n` fresh gradients are there; return the mean or sum of all that are, structured as `spec`.

        Takes of all threads are served in the order of their calls. Raises DeadlineExceeded, which says how many
        gradients were there; AccumulatorError unless `n` is an integer of at least 1, known at trace time.
        """
        return self.structured(
            self.use(ops.accumulator_take, (), {"count": self._wanted(n), **self.timeout(timeout_s)})
        )

    def structured(self, arrays: Sequence[Any]) -> Any:
        """The arrays that a take gives, structured as `spec`."""
        taken = iter(arrays)
        values = [
            RowGradient(next(taken), next(taken), component.of.shape)
            if isinstance(component, RowsType)
            else next(taken)
            for component in self.type.components
        ]
        return self._tree.unflatten(values)

    def set_step(self, step: Any) -> None:
        """Set the step; gradients of earlier ones are dropped from now on. Setting it back warns, as in TensorFlow."""
        self.use(ops.accumulator_set_step, [self._number(step)])

    @property
    def step(self) -> jax.Array:
        """The step, i32[]: the number of takes, unless it was set."""
        return self._asked(ops.accumulator_step)

    def count(self) -> jax.Array:
        """The number of gradients that are there, i32[]."""
        return self._asked(ops.accumulator_count)

    def dropped(self) -> jax.Array:
        """The number of gradients that were stale since the beginning, i32[]."""
        return self._asked(ops.accumulator_dropped)

    def __repr__(self) -> str:
        return f"<ConditionalAccumulator {self.name!r}: {self.type}, {self.settings.reduction.value}>"

    def _asked(self, op: OpDef) -> jax.Array:
        number: jax.Array = self.use(op)[0]
        return number

    def _wanted(self, n: Any) -> int:
        number = known_number(n) or 0
        if number < 1:
            raise AccumulatorError(
                f"{self.title}: take needs at least 1 gradient, not {number_text(n)}",
                "how many must be a number that is known when the program is traced",
            )
        if self.settings.limit is not None and number > self.settings.limit:
            raise AccumulatorError(
                f"{self.title}: a take of {number} would wait for ever, for it holds at most {self.settings.limit}",
                "take as many as its limit or fewer, or give it another limit",
            )
        return number

    def _number(self, step: Any) -> Any:
        value = read(step)
        check_number(value, f"a step of {self.title}")
        given = array_type_of(value)
        if given.shape != () or not jnp.issubdtype(given.dtype, jnp.integer):
            raise AccumulatorError(f"{self.title}: a step is {given}, not an integer", at=caller())
        return np.int32(value) if isinstance(value, int) else jax.lax.convert_element_type(value, np.int32)

    def _operands(self, gradient: Any) -> list[Any]:
        flat, tree = jax.tree_util.tree_flatten_with_path(gradient, is_leaf=_is_leaf)
        if tree != self._tree:
            raise GraphTypeError(
                f"{self.title} takes gradients structured as {self._tree}, but was given {tree}",
                "apply a pytree of the structure of the spec",
            )
        leaves = zip(flat, self.type.components, strict=True)
        return [array for (path, leaf), component in leaves for array in self._arrays(path, leaf, component)]

    def _arrays(self, path: tuple[Any, ...], leaf: Any, component: ArrayType | RowsType) -> list[Any]:
        where = f" at {path_name(path)!r}" if path else ""
        if isinstance(component, RowsType):
            given = _whole(leaf)
            if not isinstance(leaf, RowGradient) or given != component.of:
                shown = f"rows of {given}" if isinstance(leaf, RowGradient) else str(given)
                raise GraphTypeError(
                    f"{self.title} takes rows of {component.of}{where}, but was given {shown}",
                    "apply the rows of a gradient of lookups, dflow.grad(..., rows=True), or "
                    f"dflow.RowGradient(indices, rows, {component.of.shape})",
                )
            return [jax.lax.convert_element_type(leaf.indices, np.int32), leaf.rows]
        what = f"a gradient of {self.title}{where}"
        leaf = plain_array(leaf, what)
        check_number(leaf, what)
        array = converted(leaf.dense() if isinstance(leaf, RowGradient) else read(leaf), component)
        given = array_type_of(array).strong
        if given != component:
            raise GraphTypeError(
                f"{self.title} takes {component}{where}, but was given {given}",
                "apply a gradient of the shape and dtype of the spec, or make the accumulator with another spec",
            )
        return [array]

    def _component(self, leaf: Any) -> ArrayType | RowsType:
        return RowsType(leaf.indices.shape[0], _whole(leaf)) if isinstance(leaf, RowGradient) else _whole(leaf)

    def _checked(self, reduction: str) -> Reduction:
        if not self.type.components:
            raise AccumulatorError(f"{self.title} would sum gradients without arrays", at=self.loc)
        if reduction not in [legal.value for legal in Reduction]:
            raise AccumulatorError(
                f"{self.title}: the reduction is {reduction!r}; the legal ones are 'mean' and 'sum'", at=self.loc
            )
        arrays = [part.of if isinstance(part, RowsType) else part for part in self.type.components]
        whole = [type for type in arrays if not jnp.issubdtype(type.dtype, jnp.inexact)]
        if reduction == "mean" and whole:
            raise AccumulatorError(
                f"{self.title}: the mean of {whole[0]} has fractions",
                "use reduction='sum', or a floating dtype",
                at=self.loc,
            )
        return Reduction(reduction)


def _whole(leaf: Any) -> ArrayType:
    """The type of a gradient as one array."""
    if isinstance(leaf, RowGradient):
        return ArrayType(np.dtype(leaf.dtype), tuple(leaf.shape))
    if isinstance(leaf, Variable):
        return leaf.type
    return array_type_of(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)).strong


def _is_leaf(value: Any) -> bool:
    return is_variable(value) or isinstance(value, RowGradient)
