"""Ids of 64 bits, each as two numbers of 32: JAX has no more bits unless `jax_enable_x64` is set.

Integers are ids as they are. The id of a string is its hash. A call makes `StringIds` and `IntegerIds` of its
arguments, and a program makes `WideIds` by `wide_ids`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.jax_frontend import argument_of


class IdsAreNoNumbers(InputError):
    """Ids of 64 bits were used as numbers, or in a table without a vocabulary.

    `ids` are these ids, `use` the noun for the use, and `way_out` the remedy if it is not the one for numbers.
    """

    def __init__(self, ids: WideIds, use: str, way_out: str = "") -> None:
        self.ids, self.use, self.way_out = ids, use, way_out
        super().__init__(
            f"ids of 64 bits: expected a lookup in a table with a vocabulary, got {use}",
            way_out
            or "look them up, table(ids); or give numbers of 32 bits, for instance "
            "(ids % rows).astype(numpy.int32), before the call",
        )


class NoAttributeOfIds(IdsAreNoNumbers, AttributeError):
    """Ids of 64 bits were asked for an attribute or method of arrays that they do not have."""


@dataclass(frozen=True, eq=False)
class WideIds:
    """Ids of 64 bits, of any shape. It is a pytree, so batches of them are sliced, stacked and passed as others.

    high  u32[...], the upper 32 bits
    low   u32[...], the lower 32 bits

    It has the shape of its parts, and is indexed and reshaped like an array. Other uses as numbers raise InputError.
    """

    high: Any
    low: Any

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the ids."""
        return tuple(np.shape(self.low))

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> Any:
        """Number of ids."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return len(self.low)

    def __iter__(self) -> Iterator[WideIds]:
        return (self[position] for position in range(len(self)))

    def __getitem__(self, index: Any) -> WideIds:
        return type(self)(self.high[index], self.low[index])

    def reshape(self, *shape: Any) -> WideIds:
        """Return the ids in another shape."""
        return type(self)(self.high.reshape(*shape), self.low.reshape(*shape))

    def ravel(self) -> WideIds:
        """Return the ids in one dimension."""
        return self.reshape(-1)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise IdsAreNoNumbers(self, "a use as numbers")

    def __jax_array__(self) -> NoReturn:
        raise IdsAreNoNumbers(self, "a use as numbers")

    def __getattr__(self, name: str) -> NoReturn:
        if name in _ATTRIBUTES:
            raise NoAttributeOfIds(self, f"their {name}, an attribute of numbers")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)


class StringIds(WideIds):
    """Hashes of strings or bytes that are arguments of a call."""


class IntegerIds(WideIds):
    """Integers of 64 bits that are arguments of a call."""


def _register(kind: type[WideIds]) -> None:
    # Not by `register_dataclass`: JAX 0.10 to 0.12 finds structures of such classes equal. Where their hashes collide
    # in its table of programs, as in some processes, it would run a program for strings with integers.
    high, low = (jax.tree_util.GetAttrKey(name) for name in ("high", "low"))
    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda ids: (((high, ids.high), (low, ids.low)), None),
        lambda _, parts: kind(*parts),
        lambda ids: ((ids.high, ids.low), None),
    )


for _kind in (WideIds, StringIds, IntegerIds):
    _register(_kind)

#: Attributes of arrays that ids do not have.
_ATTRIBUTES = frozenset(name for name in dir(jax.Array) if not name.startswith("_")) - {"aval", "sharding"}
_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift", "rshift"),
    *("and", "or", "xor"),
)
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "bool", "int", "float", "index")


def _refused(method: str) -> Any:
    def refuse(ids: WideIds, *_: Any) -> NoReturn:
        raise IdsAreNoNumbers(ids, f"the operator {method.strip('_')}, which is for numbers")

    refuse.__name__ = method
    return refuse


for _name in (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *_OTHERS):
    setattr(WideIds, f"__{_name}__", _refused(f"__{_name}__"))
WideIds.__hash__ = object.__hash__  # type: ignore[method-assign]


def wide_ids(ids: Any) -> WideIds:
    """Return ids as `WideIds`, for the arguments of functions of `dflow.jit`.

    ids     integers of any shape and of at most 64 bits, in arrays or lists: each id as it is, a negative one as its 64
            bits. Or strings or bytes: a hash of 64 bits of each, the same on every machine, the number whose bytes from
            the lowest on are BLAKE2b of 8 bytes, without a key, of the bytes or of the string in UTF-8
    raises  InputError for other values: it names the first, its position, and the column if `ids` is a pandas or Polars
            column

    A function of `dflow.jit` takes such arrays as they are, and makes them of its arguments.
    """
    name = getattr(ids, "name", None)
    return wide_ids_of(ids, f"wide ids of column {name!r}" if isinstance(name, str) else "wide ids")


def wide_ids_of(ids: Any, what: str) -> WideIds:
    """Like `wide_ids`; `what` is the noun for the ids in errors."""
    if isinstance(ids, list | tuple) and isinstance(_first(ids), jax.Array):  # numbers of a list, in traced code
        ids = _stacked(ids, what)
    if isinstance(ids, jax.Array):
        return _ids_of_jax(ids, what)
    array = _array(ids, what)
    if are_strings(array):
        array = _hashes(array, what)
    elif array.dtype == object and all(_is_integer(id) for id in array.flat):
        array = np.array([int(id) % 2**64 for id in array.flat], np.uint64).reshape(array.shape)
    if not np.issubdtype(array.dtype, np.integer):
        raise _no_ids(array, what)
    bits = array.astype(np.int64 if np.issubdtype(array.dtype, np.signedinteger) else np.uint64).view(np.uint64)
    return WideIds((bits >> np.uint64(32)).astype(np.uint32), bits.astype(np.uint32))


def are_strings(array: Any) -> bool:
    """Whether an array of NumPy has only strings or bytes, as objects; also if it is empty."""
    return array.dtype == object and all(issubclass(kind, str | bytes) for kind in set(map(type, array.flat)))


def _first(ids: Any) -> Any:
    while isinstance(ids, list | tuple) and ids:
        ids = ids[0]
    return ids


def _stacked(ids: Any, what: str) -> jax.Array:
    for one in jax.tree_util.tree_leaves(ids):
        _ids_of_jax(jnp.asarray(one), what)  # raises for the first one that is no integer
    try:
        return jnp.asarray(ids)
    except (TypeError, ValueError):
        raise _ragged(what) from None


def _ragged(what: str) -> InputError:
    return InputError(
        f"{what}: expected rows of one length, got rows of several lengths", "pad them with an id of their own"
    )


def _ids_of_jax(ids: Any, what: str) -> WideIds:
    """Return ids of a JAX array, whose 8, 16 or 32 bits are those of the id, with its sign."""
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        given = argument_of(ids) or "a JAX array"
        raise InputError(f"{what}: expected integers, got {given} of {ids.dtype}", _way_out(ids.dtype))
    if ids.dtype.itemsize == 8:
        return WideIds((ids >> 32).astype(jnp.uint32), ids.astype(jnp.uint32))
    if jnp.issubdtype(ids.dtype, jnp.unsignedinteger):
        return WideIds(jnp.zeros(ids.shape, jnp.uint32), ids.astype(jnp.uint32))
    wide = ids.astype(jnp.int32)
    return WideIds((wide >> 31).astype(jnp.uint32), wide.astype(jnp.uint32))


def _array(ids: Any, what: str) -> np.ndarray[Any, Any]:
    """The ids as an array; strings, and integers of Python, as objects, which NumPy would convert to one another."""
    if isinstance(ids, Mapping):
        raise InputError(
            f"{what}: expected one column, got a {type(ids).__name__} of {len(ids)}",
            "make them of each column: {name: dflow.wide_ids(columns[name]) for name in columns}",
        )
    try:
        array = np.asarray(ids)
        if isinstance(ids, list | tuple) and array.dtype.kind not in "iu":
            array = np.asarray(ids, object)
    except ValueError:
        raise _ragged(what) from None
    if isinstance(ids, np.ma.MaskedArray) and ids.mask.any():
        raise _missing("a masked id", np.argwhere(ids.mask)[0], what, of_numbers=array.dtype.kind in "iuf")
    if not array.size and array.dtype == np.float64:
        return array.astype(np.int64)
    return array.astype(object) if array.dtype.kind in "UST" else array


def _is_integer(id: Any) -> bool:
    return isinstance(id, int | np.integer) and not isinstance(id, bool) and -(2**63) <= int(id) < 2**64


def _is_missing(id: Any) -> bool:
    is_nan = isinstance(id, float | np.floating) and bool(id != id)
    return id is None or is_nan or type(id).__name__ in ("NAType", "NaTType")  # the last two are pandas'


def _no_ids(array: np.ndarray[Any, Any], what: str) -> InputError:
    """The error for an array that has other values than integers and strings: it names the first of them."""
    if array.dtype.kind == "f" or array.dtype == object:
        for position, id in np.ndenumerate(array):
            if _is_missing(id):
                return _missing(str(id), position, what, of_numbers=array.dtype != object or _has_numbers(array))
    if array.dtype == object:
        are_strings = isinstance(array.flat[0], str | bytes)
        for position, id in np.ndenumerate(array):
            if isinstance(id, int) and not isinstance(id, bool) and not are_strings and not _is_integer(id):
                return InputError(
                    f"{what}: expected integers of at most 64 bits, got {id}{_at(position)}",
                    "give the ids as strings, str(id)",
                )
            if not (isinstance(id, str | bytes) if are_strings else _is_integer(id)):
                return InputError(
                    f"{what}: expected only {'strings' if are_strings else 'integers'}, got {id!r} "
                    f"({type(id).__name__}){_at(position)}",
                    f"convert them first, for instance by column.astype({'int' if isinstance(id, float) else 'str'})",
                )
    return InputError(f"{what}: expected integers or strings, got {array.dtype}", _way_out(array.dtype))


def _way_out(dtype: Any) -> str:
    if not jnp.issubdtype(dtype, jnp.floating):
        return "convert them: ids.astype(int)"
    return (
        'keep ids as integers or strings from the start: read a column with missing ones as dtype="Int64", and fill it'
    )


def _missing(id: str, position: Any, what: str, *, of_numbers: bool) -> InputError:
    own = "fillna(-1).astype(int)" if of_numbers else "fillna('')"
    return InputError(
        f"{what}: expected integers or strings, got {id}{_at(position)}",
        f"leave its row out, or give the missing an id of their own, such as column.{own} in pandas",
    )


def _has_numbers(array: np.ndarray[Any, Any]) -> bool:
    return any(isinstance(id, int | np.integer) for id in array.flat)


def _at(position: Any) -> str:
    return f" at {tuple(map(int, position))}" if len(position) else ""


def _hashes(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, Any]:
    """Return the hash of each string or bytes, u64[...]. Few calls of Python for each, since requests wait for it."""
    given, hash = array.ravel().tolist(), hashlib.blake2b
    try:
        texts = [id.encode() if isinstance(id, str) else id for id in given]
    except UnicodeEncodeError as error:
        position = np.unravel_index(given.index(error.object), array.shape)
        raise InputError(
            f"{what}: expected strings of Unicode, got {error.object[:50]!r}{_at(position)}, which UTF-8 cannot hold",
            "give it as bytes, id.encode('utf-8', 'surrogatepass')",
        ) from None
    digests = b"".join([hash(text, digest_size=8).digest() for text in texts])
    return np.frombuffer(digests, "<u8").reshape(array.shape)
