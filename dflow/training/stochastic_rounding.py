"""Stochastic rounding of an optimizer's bfloat16 arrays: it computes in float32, and rounds at random.

An update smaller than half the distance to the next bfloat16 number, a 256th of the parameter, would be lost each time
by rounding to the nearest. Rounded at random it arrives in the mean.

Each such rounding is an error of up to one step, which gradients must correct, however small the learning rate is. With
8 extra bits, which the optimizer keeps beside a parameter and lookups do not read, the step is a 256th of that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.programs.initial_ops import InitialOps
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.id_hash import mixed_bits
from dflow.tracing.ir.wide_sums import is_narrow
from dflow.tracing.rows.random_rounding import rounded_at_random, widened
from dflow.tracing.rows.row_values import HIGH, LOW
from dflow.tracing.state.container import uncontained
from dflow.tracing.state.resources import Variable


class StochasticRounding:
    """The random bits of an optimizer of `variables`, `name`: a function of its number of updates, which is saved.

    slots       the variables of its state
    extra_bits  whether it keeps 8 further bits of each rounded parameter, in `low`

    Raises VariableError for a variable of another float below 32 bits than bfloat16, and if none is bfloat16.
    """

    def __init__(
        self, variables: Sequence[Variable], slots: Sequence[Variable], name: str, is_named: bool, *, extra_bits: bool
    ) -> None:
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
        #: By parameter: its further bits.
        self.low = {one: _low_bits(one, name, is_named) for one in variables if extra_bits and _is_rounded(one)}

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

    def value_of(self, parameter: Variable) -> Any:
        """The value of a parameter as the update computes with it."""
        low = self.low.get(parameter)
        return self.wide(parameter.read()) if low is None else widened(parameter.read(), low.read())

    def assign(self, parameter: Variable, value: Any, seed: Any) -> None:
        """Store the new value of a parameter that is rounded, and its further bits."""
        low = self.low.get(parameter)
        if low is None:
            parameter.assign(self.stored(value, parameter, seed))
            return
        parts = [rounded_at_random(value, self._seed_of(parameter, seed), parameter.part, part) for part in (HIGH, LOW)]
        parameter.assign(parts[0])
        low.assign(parts[1])

    def stored(self, value: Any, variable: Variable, seed: Any) -> Any:
        """The value as the variable, a parameter or a slot, stores it."""
        if not self.rounds(variable) or jnp.result_type(value) != jnp.float32:
            return value
        return rounded_at_random(value, self._seed_of(variable, seed), variable.part)

    def _seed_of(self, variable: Variable, seed: Any) -> Any:
        return mixed_bits(seed ^ np.uint32(self._salts[variable]))


def _low_bits(parameter: Variable, name: str, is_named: bool) -> Variable:
    shape = parameter.shape
    made = Variable(
        InitialOps(lambda: jnp.zeros(shape, jnp.int8)),
        name=f"{name}/low_bits/{uncontained(parameter.name)}",
        near=parameter,
        trainable=False,
    )
    made.is_named, made.part = is_named and parameter.is_named, parameter.part
    return made


def _array_name(variable: Variable) -> str:
    name = uncontained(variable.name)
    return name if variable.part is None else name.rpartition("/")[0]


def _is_rounded(variable: Variable) -> bool:
    return bool(variable.dtype == jnp.bfloat16)
