"""Stochastic rounding of an optimizer's bfloat16 arrays: it computes in float32, and rounds at random.

An update smaller than half the distance to the next bfloat16 number, a 256th of the parameter, would be lost each time
by rounding to the nearest. Rounded at random it arrives in the mean.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import VariableError
from dflow.tracing.ir.each_once import mixed_bits
from dflow.tracing.ir.wide_sums import is_narrow
from dflow.tracing.rows.random_rounding import rounded_at_random
from dflow.tracing.state.container import uncontained
from dflow.tracing.state.resources import Variable


class StochasticRounding:
    """The random bits of an optimizer of `variables`, `name`: a function of its number of updates, which is saved.

    slots  the variables of its state

    Raises VariableError for a variable of another float below 32 bits than bfloat16, and if none is bfloat16.
    """

    def __init__(self, variables: Sequence[Variable], slots: Sequence[Variable], name: str, is_named: bool) -> None:
        for variable in variables:
            if is_narrow(variable.dtype) and not _is_rounded(variable):
                raise VariableError(
                    f"stochastic_rounding: expected variables of bfloat16, or of 32 bits and more, got "
                    f"{variable.name!r} of {variable.dtype}",
                    "make it with dtype=jnp.bfloat16",
                )
        if not any(map(_is_rounded, variables)):
            raise VariableError(
                f"stochastic_rounding: expected a variable of bfloat16, got {variables[0].name!r} of "
                f"{variables[0].dtype} and no other kind",
                "make one with dtype=jnp.bfloat16, or leave stochastic_rounding out",
            )
        #: For each array, the same number in every process and on any shards.
        self._salts = {
            variable: zlib.crc32(_array_name(variable).removeprefix(name).encode())
            for variable in (*variables, *slots)
            if _is_rounded(variable)
        }
        #: Number of updates, u32[].
        self.updates = Variable(
            lambda: jnp.uint32(0), name=f"{name}/rounded_updates", near=variables[0], trainable=False
        )
        self.updates.is_named = is_named

    def rounds(self, variable: Variable) -> bool:
        """Whether the new values of a parameter or a slot are rounded at random."""
        return variable in self._salts

    def begin_update(self) -> Any:
        """Count an update; return its seed, u32[]."""
        count = self.updates.read()
        self.updates.assign(count + 1)
        return mixed_bits(count)

    def wide(self, tree: Any) -> Any:
        """The arrays of a pytree, those of bfloat16 in float32."""
        return jax.tree_util.tree_map(
            lambda array: array.astype(jnp.float32) if jnp.result_type(array) == jnp.bfloat16 else array, tree
        )

    def stored(self, value: Any, variable: Variable, seed: Any) -> Any:
        """The value as the variable, a parameter or a slot, stores it."""
        if not self.rounds(variable) or jnp.result_type(value) != jnp.float32:
            return value
        return rounded_at_random(value, mixed_bits(seed ^ np.uint32(self._salts[variable])), variable.part)


def _array_name(variable: Variable) -> str:
    name = uncontained(variable.name)
    return name if variable.part is None else name.rpartition("/")[0]


def _is_rounded(variable: Variable) -> bool:
    return bool(variable.dtype == jnp.bfloat16)
