"""Any optax transformation over variables: its slots are variables too, and live with what they belong to."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax

from dflow.calls.function import jit
from dflow.distributed.training.applying import GivenOptimizer, current_applier, refuse_own_variables
from dflow.tracing.devices.device import with_state
from dflow.tracing.devices.device_name import is_on_task
from dflow.tracing.errors import GraphTypeError, VariableError
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.own_scopes import own_scope
from dflow.tracing.rows.row_gradient import is_row_gradient
from dflow.tracing.source import at, caller
from dflow.tracing.state.container import uncontained
from dflow.tracing.state.resources import Variable, add_update, is_variable, read
from dflow.tracing.state.wire import check_codec, wire
from dflow.tracing.weak_by_identity import WeakDict
from dflow.training.extra_arguments import as_averaged, check_extra, naming_extra, refuse_examples
from dflow.training.given_gradients import flat_gradients, listed
from dflow.training.optimizer_settings import settings_of
from dflow.training.optimizer_slots import OptimizerSlots, structs_of
from dflow.training.sharded_updates import on_shards
from dflow.training.stochastic_rounding import StochasticRounding

#: By the first variable: the number of optimizers that have each derived name.
_derived: WeakDict[Variable, Counter[str]] = WeakDict()

#: Names that optimizers have in other frameworks, for `apply`.
_APPLIES = ("update", "step", "minimize", "apply_gradients", "apply_updates")


class Optimizer(GivenOptimizer):
    """Applies gradients to variables by an optax transformation.

    transformation  any `optax.GradientTransformation`, chains and schedules included
    variables       a pytree of variables; gradients come in the same structure
    name            prefix of the slots' names; given none, it is derived from the variables' names, so that it is
                    the same in every process. A second optimizer of the same variables on tasks needs one
    lazy_rows       leave a row of a variable, and of the slots of its shape, as it is when its gradient is all zero
    stochastic_rounding  compute in float32, and round each new value of a bfloat16 variable, and of its slots, up or
                    down at random, so that the mean of many small updates arrives. The bits depend on the number of
                    updates, which is saved with the slots, and on the position in the array: a resumed run is exact
    extra_bits      keep 8 further bits of each such variable, in an int8 beside it, for the updates alone: then the
                    rounding is that of 24 bits, with a 256th of its error. Lookups read the bfloat16 number
    wire            codec of the gradients on their way to variables on other tasks, one of those of `dflow.wire`

    Each array of the transformation's state becomes a variable, a slot. A slot that belongs to one of `variables`, such
    as its momentum, is initialised on the same task. `apply` runs where the variables live, so that on a cluster only
    gradients travel. Raises VariableError when `variables` holds anything but variables, and GraphTypeError when
    `transformation` is no transformation.
    """

    @suggests_keywords
    def __init__(
        self,
        transformation: optax.GradientTransformation,
        variables: Any,
        *,
        name: str | None = None,
        wire: str = "none",
        lazy_rows: bool = False,
        stochastic_rounding: bool = False,
        extra_bits: bool = False,
    ) -> None:
        _check_transformation(transformation, variables)
        check_codec("an optimizer", wire)
        self._codec = wire
        self._lazy_rows = lazy_rows
        self._transformation = transformation
        self._variables, tree = jax.tree_util.tree_flatten(variables, is_leaf=is_variable)
        self._tree: Any = tree
        strangers = [type(leaf).__name__ for leaf in self._variables if not is_variable(leaf)]
        if strangers or not self._variables:
            raise VariableError(
                f"an optimizer needs variables, but was given {', '.join(strangers) or 'none'}",
                "make variables of a model's parameters with dflow.variables(params)",
            )
        if untrained := [v for v in self._variables if not jnp.issubdtype(v.dtype, jnp.inexact)]:
            raise VariableError(
                f"an optimizer was given variable {untrained[0].name!r}, which holds {untrained[0].type} and has no "
                f"gradient",
                "leave it out, or make it floating",
            )
        self._transformation = on_shards(transformation, variables)
        #: Whether the name was given, and not derived.
        self.is_named = name is not None
        self.name = name or derived_name(self._variables)
        self._slots = OptimizerSlots(self._transformation, self.variables, self.name, self.is_named)
        #: The transformation's state, with variables for arrays.
        self.slots = self._slots.state
        for variable in self._variables:
            variable.hooks.note_slots(self._slots)
        #: None for rounding to the nearest.
        self.rounding: StochasticRounding | None = None
        if stochastic_rounding:
            slots = jax.tree_util.tree_leaves(self.slots, is_leaf=is_variable)
            self.rounding = StochasticRounding(self._variables, slots, self.name, self.is_named, extra_bits=extra_bits)
            self._slots.low_bits = self.rounding.low
        elif extra_bits:
            raise VariableError(
                "extra_bits: expected stochastic_rounding=True, got False", "give both, or leave extra_bits out"
            )
        #: The names of extra arguments with which the transformation was tried.
        self._checked: set[frozenset[str]] = set()

    def apply(self, gradients: Any, *, found: Any = (), **extra: Any) -> None:
        """Update the variables by `gradients`, a pytree of arrays and `RowGradient`s in their structure.

        found  the results of `table.find` that the gradients were computed with, one or several, for each table that
               has a vocabulary; their ids are admitted to it
        extra  further arguments of the transformation, by optax's names: `value` of `optax.polyak_sgd` and
               `optax.contrib.reduce_on_plateau`; `value`, `grad` and `value_fn` of `optax.lbfgs`; `grad_fn` of
               `optax.contrib.sam`. A function among them takes the parameters' values, structured as the variables

        In traced code the update is part of the graph, placed where the variables live. If the loss only looked up
        rows of a variable, and the transformation leaves a row without a gradient as it is (SGD, Adagrad, clipping,
        scaling, and chains of these), the update reads and writes the rows that were looked up. Other transformations
        (momentum, Adam, weight decay) read and write every row, unless `lazy_rows` is set.

        In a step that a synchronous strategy runs, the strategy gets the gradients, and updates the variables by the
        average after the step has ended. So a read after `apply` in the step returns the old value. Extra arguments
        are averaged with the gradients.

        Raises GraphTypeError when the structure, or the shape of a gradient, is another than the variables', and for
        an extra argument that is missing or that nothing in the transformation uses; VariableError in a step of a
        shared run, for variables that only this process has; StrategyError in a synchronous step for an extra argument
        that has no mean, such as a function.
        """
        refuse_own_variables(self)
        by_variable = self._found_by_variable(found)
        given = wire(self._flat(gradients), self._codec) if self._codec != "none" else self._flat(gradients)
        extra = read(extra)
        applier = current_applier()
        if (extra or applier is not None) and (names := frozenset(extra)) not in self._checked:
            structs = structs_of(self.variables)
            check_extra(self._transformation.update, extra, (structs, structs_of(self.slots), structs))
            self._checked.add(names)
        if applier is not None:
            refuse_examples(given, self._variables)
            applier.apply(self, (self._tree.unflatten(given), as_averaged(extra)))
            for variable, looked in by_variable.items():
                variable.hooks.admit(looked)
            return
        self._update(given, extra, by_variable)

    def apply_mean(self, given: Any) -> None:
        """Update the variables by the mean of the gradients and extra arguments that `apply` has handed to a strategy.

        The codec is not used again: each worker's gradients went through it before they were averaged.
        """
        gradients, extra = given
        self._update(self._flat(gradients), extra, {})

    @functools.cached_property
    def settings(self) -> tuple[str, ...]:
        """A text for each setting, such as `scale_by_adam.b1: 0.9`, to compare those of several processes."""
        is_random, has_bits = self.rounding is not None, self.rounding is not None and bool(self.rounding.low)
        own = f"wire: {self._codec!r}", f"lazy_rows: {self._lazy_rows}"
        rounding = f"stochastic_rounding: {is_random}", f"extra_bits: {has_bits}"
        return (*own, *rounding, *settings_of(self._transformation))

    def _found_by_variable(self, found: Any) -> dict[Variable, list[Any]]:
        """Return what was found in each variable that `found` is about. Raises GraphTypeError if one needs more."""
        by_variable: dict[Variable, list[Any]] = {}
        own = {*self._variables}
        for one in found if isinstance(found, list | tuple) else [found]:
            parts_for = getattr(one, "parts_for", None)
            if parts_for is None:
                raise GraphTypeError(
                    f"found: expected what table.find(ids) returned, or several of these, got {type(one).__name__}",
                    "write found = table.find(ids) before the loss, and pass that",
                )
            for variable, parts in parts_for(self.name, own).items():
                by_variable.setdefault(variable, []).extend(parts)
        for variable in self._variables:
            if variable not in by_variable:
                variable.hooks.refuse_nothing_found()
        return by_variable

    def _update(self, given: list[Any], extra: dict[str, Any], found: dict[Variable, list[Any]]) -> None:
        if not is_tracing() and not extra and (found or any(map(is_row_gradient, given))):
            self._update_compiled(given, [found.get(variable) for variable in self._variables])
        else:
            self._update_in_order(given, extra, found)

    @jit
    def _update_compiled(self, given: list[Any], found: list[list[Any] | None]) -> None:
        """Update only the rows outside of traced code too."""
        pairs = zip(self._variables, found, strict=True)
        self._update_in_order(given, {}, {variable: parts for variable, parts in pairs if parts is not None})

    def _update_in_order(self, given: list[Any], extra: dict[str, Any], found: dict[Variable, list[Any]]) -> None:
        """Update by gradients of what was found; by those of a synchronous step if `found` has nothing."""
        with with_state(), own_scope("apply", self.name), naming_extra(extra) as extra:
            arrays = [gradient.dense() if is_row_gradient(gradient) else gradient for gradient in given]
            seed = None if self.rounding is None else self.rounding.begin_update()
            gradients, slots = self._wide((self._tree.unflatten(arrays), read(self.slots)))
            parameters = {variable: self._value_of(variable) for variable in self._variables}
            updates, state = self._transformation.update(
                gradients, slots, self._tree.unflatten(parameters.values()), **extra
            )
            values = self._slots.values_in(state)
            #: For some variables, a mask of the rows that are updated.
            masks: dict[Variable, Any] = {}
            applied: dict[Variable, Any] = {}
            if self._lazy_rows:
                masks = {v: _touched_rows(v, gradient) for v, gradient in zip(self._variables, arrays, strict=True)}
            flat = self._tree.flatten_up_to(updates)
            for variable, update in zip(self._variables, flat, strict=True):
                changed = jnp.where(masks[variable], update, 0) if variable in masks else update
                mask = variable.hooks.begin_update(changed, found.get(variable))
                if mask is not None:
                    mask = mask.reshape(-1, *[1] * (variable.ndim - 1))
                    masks[variable] = mask & masks[variable] if variable in masks else mask
                    changed = jnp.where(mask, changed, 0)
                applied[variable] = changed
                if self.rounding is None or not self.rounding.rounds(variable):
                    add_update(variable, changed)
                else:
                    self.rounding.assign(variable, parameters[variable] + changed, seed)
            if self.rounding is not None:
                held = jax.tree_util.tree_leaves(self.slots, is_leaf=is_variable)
                values = [self.rounding.stored(*pair, seed) for pair in zip(values, held, strict=True)]
            self._slots.assign(values, masks)
            for variable, looked in found.items():
                variable.hooks.admit(looked, applied[variable])

    def _value_of(self, variable: Variable) -> Any:
        return read(variable) if self.rounding is None else self.rounding.value_of(variable)

    def _wide(self, tree: Any) -> Any:
        return tree if self.rounding is None else self.rounding.wide(tree)

    def __getattr__(self, name: str) -> NoReturn:
        remedy = ""
        if name in _APPLIES:
            remedy = f"{at(caller())}\n  write optimizer.apply(gradients), with those of dflow.grad(loss, variables)()"
        raise AttributeError(f"'Optimizer' object has no attribute {name!r}{remedy}", name=name, obj=self)

    @property
    def variables(self) -> Any:
        """The variables, structured as they were given."""
        return self._tree.unflatten(self._variables)

    @functools.cached_property
    def _takes_examples(self) -> bool:
        """Whether the transformation takes a gradient for each example and gives one update, as `contrib.dpsgd`."""
        parameters = structs_of(self.variables)
        examples = jax.tree_util.tree_map(
            lambda struct: jax.ShapeDtypeStruct((2, *struct.shape), struct.dtype), parameters
        )
        try:
            updates, _ = jax.eval_shape(self._transformation.update, examples, structs_of(self.slots), parameters)
        except Exception:  # of any kind: each transformation has its own for shapes that it does not take
            return False
        return [update.shape for update in self._tree.flatten_up_to(updates)] == [v.shape for v in self._variables]

    def _flat(self, gradients: Any) -> list[Any]:
        return flat_gradients(gradients, self._variables, self._tree, self.name, lambda: self._takes_examples)

    def __repr__(self) -> str:
        count = len(jax.tree_util.tree_leaves(self.slots, is_leaf=is_variable))
        names = listed([variable.name for variable in self._variables])
        return f"<Optimizer {self.name!r} of {names}: {count} slot{'' if count == 1 else 's'}>"


def derived_name(variables: Sequence[Variable]) -> str:
    """Return a name made of the variables' names and their order: the same in every process that has them.

    No two optimizers of one process have the same, so they share no slots.

    Raises VariableError for a second optimizer of variables on other tasks: processes may make the two in any order.
    """
    names = [uncontained(variable.name) for variable in variables]
    name = f"optimizer_{hashlib.sha256(chr(10).join(names).encode()).hexdigest()[:8]}"
    uses = _derived.setdefault(variables[0], Counter())
    uses[name] += 1
    if uses[name] == 1:
        return name
    if any(is_on_task(variable.device) for variable in variables):
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        raise VariableError(
            f"a second optimizer of variables {shown}: expected a name that tells the two apart in every process, "
            f"got none",
            "give each of them one, name='...', the same in each process",
        )
    return f"{name}_{uses[name] - 1}"


def _check_transformation(given: Any, variables: Any) -> None:
    if _is_transformation(given):
        return
    remedy = "write dflow.Optimizer(optax.adam(1e-3), variables)"
    if _is_transformation(variables):
        fact = "its variables first and the transformation second"
    elif callable(given):
        name = getattr(given, "__name__", type(given).__name__)
        fact = f"the function {name} instead of a transformation"
        remedy = f"call it: dflow.Optimizer({name}(1e-3), variables)"
    else:
        fact = f"a {type(given).__name__} instead of a transformation"
    raise GraphTypeError(f"an optimizer was given {fact}", remedy)


def _is_transformation(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


def _touched_rows(variable: Variable, gradient: Any) -> Any:
    """Return a mask of the rows that are not all zero, in a gradient or in any of the gradients of examples.

    It has the variable's rank, with all dimensions but the first of size 1.
    """
    is_moved = gradient != 0
    if is_moved.ndim > variable.ndim:
        is_moved = is_moved.any(axis=0)
    return jnp.any(is_moved, axis=tuple(range(1, variable.ndim)), keepdims=True)
