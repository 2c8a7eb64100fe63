"""The types of a graph's values, and how each prints.

`f32[2,3]` is an array, `~f32[]` an array of a weak dtype (JAX's weak type), `ref<f32[3]>` a handle to a variable,
`queue<f32[3], i32[]>` a handle to a queue of pairs, `accumulator<f32[3], 8 rows of f32[100,3]>` a handle to an
accumulator of a dense and a row-sparse gradient, `token` the result of an op without other results. The short dtype
names are JAX's. The type of an array that is sharded over explicit axes of a mesh has these axes, `f32[8@x,2]{x=4}`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding

from dflow.tracing.errors import ParseError
from dflow.tracing.ir.explicit_sharding import TEXT, explicit_sharding, parse_sizes, sharding_of_aval, sizes_text

#: The algorithms of PRNG keys, by the short names of their dtypes.
_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def _short_name(name: str) -> str:
    # In this order: `uint` has `int` in it. `float` is also replaced within `bfloat16`, which is bf16.
    return name.replace("float", "f").replace("uint", "u").replace("int", "i").replace("complex", "c")


def _standard_dtypes() -> dict[str, Any]:
    names = ["bool", "complex64", "complex128", "float16", "float32", "float64"]
    names += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    named = {_short_name(name): np.dtype(name) for name in names}
    extra = [getattr(ml_dtypes, name) for name in dir(ml_dtypes) if re.match(r"(b?float\d|u?int[24]$)", name)]
    # JAX's dtype of a tangent of integers, which NumPy calls void.
    named["f0"] = jax.dtypes.float0
    return named | {_short_name(np.dtype(dtype).name): np.dtype(dtype) for dtype in extra}


#: Every dtype a graph can print, by its short name; PRNG keys are beside them.
DTYPES = _standard_dtypes()


def dtype_name(dtype: Any) -> str:
    """The short name of a dtype: `f32`, `bf16`, `u8`, `bool`, `key<fry>`, `f0` for `jax.dtypes.float0`."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return str(dtype)
    return "f0" if dtype == jax.dtypes.float0 else _short_name(np.dtype(dtype).name)


def key_implementation(dtype: Any) -> str:
    """The algorithm of a dtype of PRNG keys, as `jax.random.key` takes it."""
    return _KEYS[str(dtype)]


def parse_dtype(name: str) -> Any:
    """The dtype of a short name. Raises ParseError for a name that is none."""
    if name in DTYPES:
        return DTYPES[name]
    if name in _KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=_KEYS[name])).dtype
    raise ParseError(f"{name!r} is not a dtype; the dtypes are {', '.join(sorted(DTYPES))}, {', '.join(_KEYS)}")


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The dtype and shape of an array. `weak` is JAX's weak type: a Python scalar's.

    Types that differ in `sharding` alone are equal: a value is resharded where another sharding is expected.
    """

    dtype: Any
    shape: tuple[Any, ...]
    weak: bool = False
    #: The sharding over the explicit axes of a mesh; None for an array that is on no such mesh.
    sharding: NamedSharding | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{'~' if self.weak else ''}{dtype_name(self.dtype)}{sizes_text(self.shape, self.sharding)}"

    # Structures of types in messages show them so.
    __repr__ = __str__

    @property
    def size_bytes(self) -> int:
        """The size of the elements in bytes."""
        return int(math.prod(self.shape) * self.dtype.itemsize)

    @property
    def strong(self) -> ArrayType:
        """The dtype and shape alone: not weak, and without a sharding."""
        return ArrayType(self.dtype, self.shape)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The same type as JAX's functions take it."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.weak, sharding=self.sharding)


@dataclass(frozen=True, slots=True)
class RefType:
    """A handle to a variable that holds an `of`."""

    of: ArrayType

    def __str__(self) -> str:
        return f"ref<{self.of}>"


@dataclass(frozen=True, slots=True)
class QueueType:
    """A handle to a queue whose elements have these components. A dimension that is None differs by element."""

    components: tuple[ArrayType, ...]

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The types of the arrays of an element."""
        return self.components

    def __str__(self) -> str:
        return f"queue<{', '.join(map(str, self.components))}>"


@dataclass(frozen=True, slots=True)
class RowsType:
    """`count` rows of an array of the type `of`, with their indices."""

    count: int
    of: ArrayType

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.of.dtype

    def arrays(self, count: int | None = None) -> tuple[ArrayType, ArrayType]:
        """The types of the indices and the rows, of `count` rows rather than its own."""
        number = self.count if count is None else count
        return ArrayType(np.dtype("int32"), (number,)), ArrayType(self.of.dtype, (number, *self.of.shape[1:]))

    def __str__(self) -> str:
        return f"{self.count} rows of {self.of}"


@dataclass(frozen=True, slots=True)
class AccumulatorType:
    """A handle to an accumulator of gradients with these components; `RowsType` has the rows of a row-sparse one."""

    components: tuple[ArrayType | RowsType, ...]

    @property
    def arrays(self) -> tuple[ArrayType, ...]:
        """The types of the arrays that a take gives."""
        parts = (part.arrays() if isinstance(part, RowsType) else (part,) for part in self.components)
        return tuple(array for part in parts for array in part)

    def __str__(self) -> str:
        return f"accumulator<{', '.join(map(str, self.components))}>"


@dataclass(frozen=True, slots=True)
class TokenType:
    """The result of an op that gives no array; it only stands in order edges."""

    def __str__(self) -> str:
        return "token"


#: A handle to state that the host keeps between XLA computations.
HostType = QueueType | AccumulatorType
HOST_HANDLES = (QueueType, AccumulatorType)

Type = ArrayType | RefType | HostType | TokenType

#: The types of handles to state, which graphs take as inputs and no node gives.
HANDLES = (RefType, *HOST_HANDLES)


def strong(type: Type) -> Type:
    """The type, not weak if it is an array's."""
    return type.strong if isinstance(type, ArrayType) else type


def array_type_of(value: Any) -> ArrayType:
    """The type of anything that has JAX's abstract value: an array, a scalar, a tracer, a ShapeDtypeStruct."""
    if isinstance(value, jax.ShapeDtypeStruct):
        shape = tuple(value.shape)
        return ArrayType(value.dtype, shape, bool(value.weak_type), explicit_sharding(value.sharding, shape))
    return type_of_aval(jax.typeof(value))


def type_of_aval(aval: Any) -> ArrayType:
    """The type of JAX's abstract value of an array."""
    return ArrayType(aval.dtype, tuple(aval.shape), bool(getattr(aval, "weak_type", False)), sharding_of_aval(aval))


_ARRAY = re.compile(rf"(~?)([a-z]\w*(?:<\w+>)?)({TEXT})")


def parse_type(text: str) -> Type:
    """Read a type back from its text. Raises ParseError."""
    if text == "token":
        return TokenType()
    if text.startswith("ref<") and text.endswith(">"):
        return RefType(_parse_array(text[4:-1]))
    if text.startswith("queue<") and text.endswith(">"):
        return QueueType(tuple(_parse_array(component) for component in text[6:-1].split(", ")))
    if text.startswith("accumulator<") and text.endswith(">"):
        return AccumulatorType(tuple(_parse_part(part) for part in text[12:-1].split(", ")))
    return _parse_array(text)


def _parse_array(text: str) -> ArrayType:
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ParseError(
            f"{text!r} is not a type; a type looks like f32[2,3], ~f32[], ref<f32[3]>, queue<f32[3]>, "
            "accumulator<f32[3], 2 rows of f32[5,3]> or token"
        )
    weak, dtype, sizes = match.groups()
    shape, sharding = parse_sizes(sizes)
    return ArrayType(parse_dtype(dtype), shape, bool(weak), sharding)


def _parse_part(text: str) -> ArrayType | RowsType:
    count, rows, of = text.partition(" rows of ")
    if not rows:
        return _parse_array(text)
    if re.fullmatch("[0-9]{1,19}", count) is None:
        raise ParseError(f"{text!r} is not a part of an accumulator; a row-sparse one looks like 2 rows of f32[5,3]")
    return RowsType(int(count), _parse_array(of))
