"""A slice of an initial value, computed without the rest of it.

The shard of a table on one task begins with the values that the whole table would have there, and no process has room
for the whole. So the initialiser's program is computed backwards from the slice: an op whose elements each depend on
the elements at their own position is computed on the slice alone, and so are random bits, since JAX draws each from the
key and its position (`jax_threefry_partitionable`). An op of another kind is computed whole, and sliced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.jax_frontend import Equation, Jaxpr, bind, closed_parts, dispatched, is_literal, key_implementation
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.lookups import CALLS, RULED
from dflow.tracing.rows.row_wise import ELEMENTWISE

_FUNCTIONS = {**CALLS, **RULED}
#: Elementwise ops that gradients do not have.
_ELEMENTWISE = ELEMENTWISE | {
    *("bitcast_convert_type", "shift_left", "shift_right_arithmetic", "shift_right_logical", "stop_gradient"),
    *("population_count", "clz"),
}

#: By group of four rounds of Threefry-2x32, alternately: by how many bits each round rotates.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


class ArrayPart(NamedTuple):
    """The part that a variable has of an array that several variables divide: the array's shape, and the indices."""

    whole: tuple[int, ...]
    indices: AxisSlice


def have_each_once(parts: Sequence[AxisSlice], size: int) -> bool:
    """Whether each index below `size` is in exactly one part. The parts are neighbours, or all have one step."""
    ordered = sorted(parts, key=lambda part: part.start)
    starts, steps = [part.start for part in ordered], {part.step for part in parts}
    if steps == {1}:
        return [*starts, size] == [0, *(part.start + part.size for part in ordered)]
    sizes = [part.size for part in ordered]
    is_dealt = steps == {len(parts)} and starts == [*range(len(parts))]
    return is_dealt and sizes == [-(-(size - start) // len(parts)) for start in starts]


def sliced(initial: Callable[[], Any], part: AxisSlice) -> Callable[[], Any]:
    """Return a function that gives the part of the array that `initial` returns, with the same bits."""
    return lambda: sliced_at(initial, part)(None)


def sliced_at(initial: Callable[[], Any], part: AxisSlice) -> Callable[[Any], Any]:
    """As `sliced`, for parts that begin later by a number of indices, which the function takes and may be traced."""

    def initial_part(origin: Any) -> Any:
        jaxpr, consts, _ = dispatched(initial)

        def given(position: int, part: AxisSlice | None) -> Any:
            return _part_of(consts[position], part, origin)

        return _Program(jaxpr, given, origin).value(jaxpr.outvars[0], part)

    return initial_part


def _part_of(array: Any, part: AxisSlice | None, origin: Any) -> Any:
    return array if part is None else part.of(array, origin)


class _Program:
    """A program that computes parts of values; `given(n, part)` is its n-th constant or argument, or a part of it."""

    def __init__(self, jaxpr: Jaxpr, given: Callable[[int, AxisSlice | None], Any], origin: Any) -> None:
        self._given, self._origin = given, origin
        self._positions = {var: position for position, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}
        self._makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
        self._known: dict[tuple[Any, AxisSlice | None], Any] = {}

    def value(self, atom: Any, part: AxisSlice | None) -> Any:
        """The value of an atom, or a part of it."""
        if is_literal(atom):
            return _part_of(atom.val, part, self._origin)
        if (atom, part) not in self._known:
            if atom in self._positions:
                self._known[atom, part] = self._given(self._positions[atom], part)
            elif part is None:
                self._compute(self._makers[atom])
            else:
                found = self._part(self._makers[atom], atom, part)
                self._known[atom, part] = part.of(self.value(atom, None), self._origin) if found is None else found
        return self._known[atom, part]

    def _compute(self, equation: Equation) -> None:
        values = [self.value(atom, None) for atom in equation.invars]
        results = bind(equation.primitive, equation.params, values, None)
        self._known.update(((var, None), result) for var, result in zip(equation.outvars, results, strict=True))

    def _part(self, equation: Equation, result: Any, part: AxisSlice) -> Any:
        """Compute a part of a result; None if all of it must be computed."""
        name, params = equation.primitive.name, equation.params
        shape = part.shape(result.aval.shape)
        if name in _FUNCTIONS:
            return self._call(equation, equation.outvars.index(result), part)
        if name in _ELEMENTWISE:
            operands = [self._beside(atom, result.aval.shape, part) for atom in equation.invars]
            return bind(equation.primitive, params, operands, None)[0]
        if name == "broadcast_in_dim" and len(equation.invars) == 1:
            [operand], dims = equation.invars, params["broadcast_dimensions"]
            inner = None
            if part.axis in dims and operand.aval.shape[dims.index(part.axis)] == result.aval.shape[part.axis]:
                inner = part._replace(axis=dims.index(part.axis))
            return jax.lax.broadcast_in_dim(self.value(operand, inner), shape, dims)
        if name == "iota":
            iota = jax.lax.broadcasted_iota(params["dtype"], shape, params["dimension"])
            if part.axis != params["dimension"]:
                return iota
            return iota * part.step + jnp.asarray(_moved(part.start, self._origin), params["dtype"])
        if name == "random_bits":
            key = self.value(equation.invars[0], None)
            return _bits(key, params["bit_width"], result.aval.shape, part, self._origin)
        return None

    def _beside(self, atom: Any, shape: Sequence[int], part: AxisSlice) -> Any:
        """The value of an operand of an elementwise op whose result has this shape; a dimension of size 1 is kept."""
        is_cut = len(atom.aval.shape) == len(shape) and atom.aval.shape[part.axis] == shape[part.axis]
        return self.value(atom, part if is_cut else None)

    def _call(self, equation: Equation, number: int, part: AxisSlice) -> Any:
        """Compute a part of a result of a function, compiled as one program like the function."""
        jaxpr, consts = closed_parts(equation.params[_FUNCTIONS[equation.primitive.name]])
        needed: dict[tuple[int, AxisSlice | None], Any] = {}

        def run(given: Callable[[int, AxisSlice | None], Any], origin: Any) -> Any:
            def of(position: int, part: AxisSlice | None) -> Any:
                is_const = position < len(consts)
                return _part_of(consts[position], part, origin) if is_const else given(position - len(consts), part)

            return _Program(jaxpr, of, origin).value(jaxpr.outvars[number], part)

        def note(position: int, part: AxisSlice | None) -> Any:
            aval = jaxpr.invars[position].aval
            needed[position, part] = None
            return jnp.zeros(aval.shape if part is None else part.shape(aval.shape), aval.dtype)

        jax.eval_shape(lambda: run(note, self._origin))
        operands = [self.value(equation.invars[position], part) for position, part in needed]

        def call(origin: Any, *values: Any) -> Any:
            return run(lambda *key: dict(zip(needed, values, strict=True))[key], origin)

        return jax.jit(call)(self._origin, *operands)


def _bits(key: Any, bit_width: int, shape: Sequence[int], part: AxisSlice, origin: Any) -> Any:
    """A part of the random bits that JAX draws for the shape; None where they depend on all others.

    The bits at a position are the cipher Threefry of its number in the array, as in `jax.random.bits` (JEP 9263).
    """
    is_threefry = key_implementation(key.dtype).name == "threefry2x32" and key.shape == ()
    if not (is_threefry and _is_partitionable() and math.prod(part.shape(shape)) and max(shape) < 1 << 32):
        return None
    first, second = _threefry(jax.random.key_data(key), *_positions(shape, part, origin))
    if bit_width == 64:
        return (first.astype(jnp.uint64) << 32) | second.astype(jnp.uint64)
    return (first ^ second).astype(jnp.dtype(f"uint{bit_width}"))


@jax.jit
def _threefry(words: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Encrypt two numbers of 32 bits by Threefry-2x32 with 20 rounds, as JAX does.

    JAX's own is a loop on a CPU. XLA makes one kernel of this, which it compiles in a quarter of the time.
    """
    keys = words[0], words[1], words[0] ^ words[1] ^ np.uint32(0x1BD11BDA)
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = ((low << rotation) | (low >> (32 - rotation))) ^ high
        high, low = high + keys[(group + 1) % 3], low + keys[(group + 2) % 3] + np.uint32(group + 1)
    return high, low


def _positions(shape: Sequence[int], part: AxisSlice, origin: Any) -> tuple[Any, Any]:
    """The upper and lower 32 bits of the number of each element of a part in the array of the shape."""
    inner = part.shape(shape)
    high, low = jnp.zeros(inner, jnp.uint32), jnp.zeros(inner, jnp.uint32)
    for dim in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, inner, dim)
        if dim == part.axis:
            index = index * np.uint32(part.step) + jnp.asarray(_moved(part.start, origin), jnp.uint32)
        stride = math.prod(shape[dim + 1 :])
        if math.prod(shape) < 1 << 32:  # as is each stride
            low = low + index * np.uint32(stride)
            continue
        # By halves of 16 bits: an index times a stride may exceed 32 bits.
        for index_shift, half in ((0, index & 0xFFFF), (16, index >> 16)):
            for stride_shift in (0, 16, 32):
                factor, shift = (stride >> stride_shift) & 0xFFFF, index_shift + stride_shift
                if factor == 0:
                    continue
                product = half * np.uint32(factor)
                lower = product << shift if shift < 32 else jnp.zeros_like(product)
                low = low + lower
                high = high + _upper(product, shift) + (low < lower)
    return high, low


def _upper(product: Any, shift: int) -> Any:
    """The upper 32 bits of a product shifted to the left."""
    return product << (shift - 32) if shift >= 32 else product >> (32 - shift) if shift else jnp.zeros_like(product)


def _moved(start: int, origin: Any) -> Any:
    return start if origin is None else start + origin


def _is_partitionable() -> bool:
    config: Any = jax.config
    return bool(config.jax_threefry_partitionable)
