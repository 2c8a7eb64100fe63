"""Checks of ids whose outcome is a value of the program, for programs that run without Python.

Each check of a program has an entry in its `State`, like a variable. The value is an id outside of its table, or 0
while no such id was found. So the outcome passes through loops and branches like the value of a variable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from dflow.tracing.jax_frontend import Equation, inner_parts
from dflow.tracing.primitives.id_checks import check_ids_p


@dataclass(frozen=True)
class IdCheck:
    """The checks of ids of one dtype for one table, of `size` rows; `noun` says what the ids are."""

    table: str
    size: int
    dtype: Any
    noun: Literal["ids", "segments"]

    @staticmethod
    def of(equation: Equation) -> IdCheck:
        """The check that an equation of `check_ids_p` makes."""
        params = equation.params
        return IdCheck(params["table"], params["size"], equation.invars[0].aval.dtype, params["noun"])

    @property
    def name(self) -> str:
        """A name that tells it from the other checks of a program."""
        return f"{self.table} ({self.noun} of {self.dtype} below {self.size})"

    def worst(self, ids: Any, before: Any) -> Any:
        """An id that is outside: `before` if it is, else one of `ids`, or 0 without one."""
        low, high = ids.min(initial=0), ids.max(initial=0)
        outside = jnp.where(low < 0, low, jnp.where(high >= self.size, high, 0))
        return jnp.where(before != 0, before, outside.astype(self.dtype))


def id_checks(equations: Iterable[Equation]) -> list[IdCheck]:
    """Return the checks that equations and the programs inside them make, each once, in order."""
    found: dict[IdCheck, None] = {}
    for equation in equations:
        if equation.primitive is check_ids_p:
            found[IdCheck.of(equation)] = None
        for inner, _ in inner_parts(equation.params):
            found.update(dict.fromkeys(id_checks(inner.eqns)))
    return list(found)
