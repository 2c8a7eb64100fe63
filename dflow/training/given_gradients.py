"""The gradients that `Optimizer.apply` is given: one for each variable, or an error that says whose they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.derivatives.uncalled import refuse_uncalled
from dflow.tracing.errors import GraphTypeError
from dflow.tracing.names_of_values import variable_differentiated
from dflow.tracing.rows.row_gradient import is_row_gradient
from dflow.tracing.state.resources import Variable, is_variable
from dflow.tracing.state.variable_trees import structure_text

_REMEDY = "differentiate with respect to the very variables the optimizer was made for"

_PAIR = (
    "take the pair apart:\n"
    "    value, gradients = dflow.value_and_grad(loss, variables)()\n"
    "    optimizer.apply(gradients)"
)


def flat_gradients(
    gradients: Any, variables: Sequence[Variable], tree: Any, optimizer: str, takes_examples: Callable[[], bool]
) -> list[Any]:
    """Return the gradients in a list, one for each variable. Raises GraphTypeError if they are not of the variables.

    tree            the structure of the variables
    takes_examples  returns whether the transformation takes a gradient for each example
    """
    refuse_uncalled("apply", gradients)
    given: Any = jax.tree_util.tree_structure(gradients, is_leaf=is_row_gradient)
    if held := list(filter(is_variable, jax.tree_util.tree_leaves(gradients))):
        raise GraphTypeError(
            f"apply: expected a gradient, got variable {held[0].name!r}",
            f"{_REMEDY}, by dflow.grad(loss, variables)",
        )
    if given != tree:
        if isinstance(gradients, tuple) and given.num_leaves > 1 and given.children()[1:] == [tree]:
            raise GraphTypeError("apply: expected gradients, got a pair whose second part fits the variables", _PAIR)
        if given == jax.tree_util.tree_structure(0) and jnp.shape(gradients) == ():
            raise GraphTypeError(
                f"apply: expected gradients of {len(variables)} variables, got a scalar, such as a loss",
                "write value, gradients = dflow.value_and_grad(loss, variables)() and apply the gradients",
            )
        raise _other_variables(gradients, variables, tree, optimizer)
    flat = jax.tree_util.tree_leaves(gradients, is_leaf=is_row_gradient)
    for variable, gradient in zip(variables, flat, strict=True):
        shape = gradient.shape if is_row_gradient(gradient) else jnp.shape(gradient)
        if shape != variable.shape and not (shape[1:] == variable.shape and takes_examples()):
            raise GraphTypeError(
                f"the gradient of variable {variable.name!r} has the shape {shape}, but the variable {variable.shape}",
                _REMEDY,
            )
    return flat


def _other_variables(gradients: Any, variables: Sequence[Variable], tree: Any, optimizer: str) -> GraphTypeError:
    """The error for gradients of another structure, which names the variables in question where it knows them."""
    flat = jax.tree_util.tree_leaves(gradients, is_leaf=is_row_gradient)
    names, given = [variable.name for variable in variables], [*map(variable_differentiated, flat)]
    if None not in given:
        strangers = [name for name in given if name not in names]
        missing = [name for name in names if name not in given]
        what = f"it has no variable {', '.join(map(repr, strangers))}" if strangers else ""
        what = what or f"that of {', '.join(map(repr, missing))} is missing" if missing else what
        if what:
            return GraphTypeError(
                f"apply: expected the gradients of {optimizer!r}, of {listed(names)}, got those of "
                f"{listed(given)}: {what}",
                f"make the optimizer of all variables that the loss is differentiated by, or\n  {_REMEDY}",
            )
    given_tree: Any = jax.tree_util.tree_structure(gradients, is_leaf=is_row_gradient)
    return GraphTypeError(
        f"the gradients have the structure {structure_text(given_tree)}, but the variables {structure_text(tree)}",
        _REMEDY,
    )


def listed(names: Sequence[Any]) -> str:
    """The names for a message; of many, the first ones."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
