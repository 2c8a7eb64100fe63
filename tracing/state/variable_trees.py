"""Pytrees of variables: made of arrays, written to, and looked through.

A variable is a leaf. Compiled functions take variables by their handles, which are pytrees without leaves.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.errors import VariableError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.path_names import path_name
from dflow.tracing.state.initial_value import needed_arguments
from dflow.tracing.state.resources import Variable, is_variable


def trainable_variables(tree: Any) -> list[Variable]:
    """The variables of a pytree that gradients may be taken with respect to, in its order.

    Those made with `trainable=False` are left out, and those of integers, bools and keys, which have no gradient.
    """
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=is_variable)
    return [leaf for leaf in leaves if is_variable(leaf) and leaf.trainable and jnp.issubdtype(leaf.dtype, jnp.inexact)]


@suggests_keywords
def variables(tree: Any, *, prefix: str = "", trainable: bool = True) -> Any:
    """A pytree of variables from a pytree of arrays or initialisers, named by their paths: `Dense_0/kernel`.

    It is how the parameters of a Flax or Haiku model, or a plain dict, become state. The result has the same
    structure with variables for leaves; `read` gives the arrays back.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in flat:
        if callable(leaf) and (needed := needed_arguments(leaf)):
            raise VariableError(
                f"leaf {path_name(path)!r} of a pytree: expected an array or a function without arguments, got one "
                f"that needs {', '.join(needed)}",
                "wrap an initialiser in a lambda, and leave out other functions; of a module of Equinox:\n"
                "  arrays, rest = equinox.partition(module, equinox.is_array)",
            )
    made = [Variable(leaf, name=prefix + path_name(path), trainable=trainable) for path, leaf in flat]
    return jax.tree_util.tree_unflatten(treedef, made)


def assign(tree: Any, values: Any) -> None:
    """Assign to each variable of a pytree the array in its place in `values`, a pytree of the same structure.

    Raises VariableError when `tree` holds anything but variables or `values` has another structure, and
    VariableShapeError when an array does not fit its variable; the variables before it keep their new values.
    """
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=is_variable)
    structure: Any = treedef
    for leaf in leaves:
        if not is_variable(leaf):
            raise VariableError(
                f"assign was given {type(leaf).__name__} among its variables", "write dflow.assign(variables, values)"
            )
    try:
        flat = structure.flatten_up_to(values)
    except ValueError:
        given = jax.tree_util.tree_structure(values, is_leaf=is_variable)
        raise VariableError(
            "the values do not have the structure of the variables",
            f"give values of the structure {structure_text(structure)}, not {structure_text(given)}",
        ) from None
    for leaf, value in zip(leaves, flat, strict=True):
        leaf.assign(value)


def handles(tree: Any) -> Any:
    """Replace each variable in the pytree by its handle, so that JAX does not convert the variable to an array."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    if not any(map(is_variable, leaves)):
        return tree
    return jax.tree_util.tree_unflatten(treedef, [leaf.handle if is_variable(leaf) else leaf for leaf in leaves])


def structure_text(tree: Any) -> str:
    """The structure of a pytree as a message shows it, `*` for a leaf; a long one is cut."""
    text = str(tree).removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= 200 else f"{text[:200]}..."
