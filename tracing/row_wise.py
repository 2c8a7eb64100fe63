"""Which gradients an update rule only scales, so that it may be given their rows alone.

A rule is given as the jaxpr of one step of it. It treats a gradient row by row when the update is that gradient times
numbers that do not depend on it, and nothing else depends on the gradient: then rows for one index, each scaled by
itself, add up to what the whole gradient's update would be. Momentum, Adam, clipping and weight decay do not.
"""

from __future__ import annotations

from typing import Any

from dflow.tracing.jax_frontend import Equation, Jaxpr, closed_parts, is_literal
from dflow.tracing.lookups import CALLS

_SCALES_BY_SECOND = ("mul", "div")
_KEEPS = ("neg", "convert_element_type", "copy", "name")


def scales_only(jaxpr: Jaxpr, gradient: Any, update: Any) -> bool:
    """Whether `update`, a result of `jaxpr`, is `gradient`, an operand, times numbers, and no other result needs it."""
    scaled = _scaled(jaxpr, {gradient}, set())
    if scaled is None or is_literal(update) or update not in scaled:
        return False
    others = [atom for atom in jaxpr.outvars if atom is not update]
    return jaxpr.outvars.count(update) == 1 and not any(atom in scaled for atom in others if not is_literal(atom))


def _scaled(jaxpr: Jaxpr, scaled: set[Any], uniform: set[Any]) -> set[Any] | None:
    """Every value that is the gradient times numbers; None when one is made of it in another way.

    `uniform` has the arrays whose elements are all the same number.
    """
    for equation in jaxpr.eqns:
        operands = [atom for atom in equation.invars if not is_literal(atom)]
        if not any(atom in scaled for atom in operands):
            if equation.primitive.name == "broadcast_in_dim" and _is_number(equation.invars[0], uniform):
                uniform.update(equation.outvars)
            continue
        if equation.primitive.name in CALLS:
            inner = _scaled_inside(equation, scaled, uniform)
            if inner is None:
                return None
            scaled.update(inner)
        elif _keeps_rows(equation, scaled, uniform):
            scaled.update(equation.outvars)
        else:
            return None
    return scaled


def _scaled_inside(equation: Equation, scaled: set[Any], uniform: set[Any]) -> set[Any] | None:
    inner = closed_parts(equation.params[CALLS[equation.primitive.name]])[0]
    given = list(zip(inner.invars, equation.invars, strict=True))
    known = [(var, atom) for var, atom in given if not is_literal(atom)]
    within = {var for var, atom in known if atom in scaled}
    found = _scaled(inner, within, {var for var, atom in known if _is_number(atom, uniform)})
    if found is None:
        return None
    results = zip(inner.outvars, equation.outvars, strict=True)
    return {var for atom, var in results if not is_literal(atom) and atom in found}


def _keeps_rows(equation: Equation, scaled: set[Any], uniform: set[Any]) -> bool:
    name, operands = equation.primitive.name, equation.invars
    if name in _KEEPS:
        return True
    if name not in _SCALES_BY_SECOND:
        return False
    first, second = operands
    first_is_scaled = not is_literal(first) and first in scaled
    if name == "mul" and not first_is_scaled:
        first, second, first_is_scaled = second, first, not is_literal(second) and second in scaled
    return first_is_scaled and (is_literal(second) or second not in scaled) and _is_number(second, uniform)


def _is_number(atom: Any, uniform: set[Any]) -> bool:
    return atom.aval.shape == () or (not is_literal(atom) and atom in uniform)
