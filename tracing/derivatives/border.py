"""The variables of a region of a program: the values that enter it, and the values that are written at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from dflow.tracing.jax_frontend import accesses, only_added, only_summed


class Border:
    """The values of variables that enter a region of a program, and the values that leave it.

    A variable that the region only adds to enters as zero, if `adds` is true of it or all adds are sums over a batch.
    Its final value is added to the variable as one update, so what other steps add meanwhile is not lost.
    """

    def __init__(self, effects: Any, adds: Callable[[Any], bool]) -> None:
        reads, self.writes = accesses(effects)
        self.touched = sorted({*reads, *self.writes}, key=lambda variable: variable.serial)
        # A set finds variables by identity; `in` of a list would compare their values.
        summed = frozenset(only_summed(effects))
        self.added = frozenset(variable for variable in only_added(effects) if variable in summed or adds(variable))
        self._summed = self.added.intersection(summed)

    def value(self, variable: Any) -> Any:
        """The value of a variable that enters."""
        return jnp.zeros(variable.shape, variable.dtype) if variable in self.added else variable.read()

    def write_back(self, after: Sequence[Any]) -> None:
        """Write the values `after` the region to the variables that it writes, in order."""
        for variable, value in zip(self.writes, after, strict=True):
            if variable in self.added:
                variable.assign_add(value, reduce="sum" if variable in self._summed else None)
            else:
                variable.assign(value)
