"""Handles to queues, as a user holds them.

A queue's type is that of its elements, which its home holds. The kinds of queues and closing follow TensorFlow 1's
documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dflow.tracing.argument_ids import is_list_of_strings, with_string_ids
from dflow.tracing.element_arrays import plain_array
from dflow.tracing.errors import QueueError, QueueTypeError
from dflow.tracing.ir import ops
from dflow.tracing.ir.op import OpDef
from dflow.tracing.ir.queue_settings import DEFAULT_TIMEOUT_S, QueueKind, QueueSettings
from dflow.tracing.ir.types import ArrayType, QueueType, array_type_of
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.number_range import check_numbers
from dflow.tracing.path_names import leaf_names
from dflow.tracing.state.host_resource import HostResource, known_number, number_text
from dflow.tracing.state.initial_value import converted
from dflow.tracing.state.resources import is_variable
from dflow.tracing.wide_ids import StringIds, WideIds

_OF_STRINGS = (
    "a queue holds strings as the ids of a table with a vocabulary: make it with jax.ShapeDtypeStruct(shape, "
    "numpy.str_) where\n  the strings are, or leave the strings out"
)


@dataclass(frozen=True)
class PaddedSpec:
    """A component of a `PaddingFIFOQueue`; a dimension that is None may differ from element to element."""

    shape: tuple[int | None, ...]
    dtype: Any


class Queue(HostResource):
    """The base of all kinds of queues. Made by one of the classes below.

    Elements are pytrees of arrays of the types in `spec`. A part of the dtype `numpy.str_` takes strings, and gives
    their ids, `WideIds`, for a lookup in a table with a vocabulary. Every wait ends: served, with DeadlineExceeded
    after `timeout_s`, or with QueueClosed once the queue is closed and cannot serve it. A queue cannot be made inside
    traced code.
    """

    kind = "queue"
    error = QueueError
    batched_remedy = "use enqueue_many or dequeue_many outside of the vmap"
    looped_remedy = "dequeue before the loop, for instance with dequeue_many, or enqueue after it"
    puts = "enqueue"
    type: QueueType
    settings: QueueSettings

    def __init__(self, spec: Any, settings: QueueSettings, name: str | None, *, padded: bool = False) -> None:
        super().__init__(name)
        capacity: Any = settings.capacity
        if not isinstance(capacity, int | np.integer) or capacity < 1:
            raise QueueError(
                f"queue {self.name!r} cannot have the capacity {capacity!r}",
                "give a whole number of elements, from 1; it stands before the spec",
                at=self.loc,
            )
        self.settings = msgspec.structs.replace(settings, capacity=int(capacity))
        self._tree: Any
        spec = with_string_ids(spec, lambda: leaf_names("spec", spec))
        leaves, self._tree = jax.tree_util.tree_flatten(spec, is_leaf=_is_part_of_spec)
        self.type = QueueType(tuple(self._component(leaf, padded) for leaf in leaves))
        if not leaves:
            raise QueueError(f"queue {self.name!r} would hold elements without arrays", at=self.loc)
        self.settle()

    @property
    def spec(self) -> Any:
        """The types of an element: a pytree of `ShapeDtypeStruct`s, of `PaddedSpec`s where a dimension is open."""
        parts = [PaddedSpec(t.shape, t.dtype) if None in t.shape else t.struct for t in self.type.components]
        return jax.tree_util.tree_unflatten(self._tree, parts)

    @property
    def capacity(self) -> int:
        """The largest number of elements; an enqueue beyond it waits."""
        return self.settings.capacity

    def enqueue(self, element: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Put an element in, waiting for room. Raises QueueTypeError, QueueClosed, DeadlineExceeded."""
        self.use(ops.queue_enqueue, self.fitting("enqueue", element), self.timeout(timeout_s))

    def enqueue_many(self, elements: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Put the rows of `elements` in, one after the other. Each array has one dimension more than the spec's.

        Raises as `enqueue`; rows that went in before the error stay in.
        """
        arrays = self.fitting("enqueue_many", elements, are_rows=True)
        self.use(ops.queue_enqueue_many, arrays, self.timeout(timeout_s))

    def dequeue(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Take an element, waiting for one. Raises QueueClosed, DeadlineExceeded."""
        return jax.tree_util.tree_unflatten(self._tree, self._take(ops.queue_dequeue, self.timeout(timeout_s)))

    def dequeue_many(self, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Take `n` elements together, stacked. Raises QueueClosed when closed with fewer, DeadlineExceeded."""
        taken = self._take(ops.queue_dequeue_many, {"count": self._count(n), **self.timeout(timeout_s)})
        return jax.tree_util.tree_unflatten(self._tree, taken)

    def dequeue_up_to(self, n: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[Any, jax.Array]:
        """Take `n` elements, or what is left of a closed queue: the elements stacked, and how many there are.

        There are always `n` rows, so that the result has a type; those from the number on are zeros. Raises
        QueueClosed when the queue is closed and empty, DeadlineExceeded.
        """
        *taken, count = self._take(ops.queue_dequeue_up_to, {"count": self._count(n), **self.timeout(timeout_s)})
        return jax.tree_util.tree_unflatten(self._tree, taken), count

    def size(self) -> jax.Array:
        """The number of elements: in traced code at this point of the program, elsewhere now."""
        size: jax.Array = self.use(ops.queue_size)[0]
        return size

    def is_closed(self) -> jax.Array:
        """Whether it is closed, bool[]: in traced code at this point of the program, elsewhere now."""
        is_closed: jax.Array = self.use(ops.queue_is_closed)[0]
        return is_closed

    def close(self, cancel_pending: bool = False) -> None:
        """Refuse later enqueues; with `cancel_pending`, pending ones fail too. Elements in it can still be dequeued."""
        self.use(ops.queue_close, (), {"cancel_pending": True} if cancel_pending else {})

    def __repr__(self) -> str:
        shown = ", ".join(map(str, jax.tree_util.tree_leaves(_readable(self._tree, self.type.components))))
        return f"<{type(self).__name__} {self.name!r}: queue<{shown}>, capacity {self.capacity}>"

    def _take(self, op: OpDef, attributes: dict[str, Any]) -> Sequence[Any]:
        if is_tracing() and any(None in component.shape for component in self.type.components):
            raise QueueError(
                f"{op.method} in traced code from queue {self.name!r}, whose elements have no one shape: "
                f"{self._shown(self.type.components)}",
                "dequeue outside of traced code, and pass it what you get",
            )
        return self.use(op, (), attributes)

    def _count(self, count: Any) -> int:
        number = known_number(count)
        if number is not None and number >= 0:
            return number
        fact = "how many must be a number that is known when the program is traced"
        remedy = fact if number is None else "give how many to take, from 0"
        raise QueueError(f"queue {self.name!r} was asked for {number_text(count)} elements", remedy)

    def _component(self, leaf: Any, padded: bool) -> ArrayType:
        dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
        if dtype is None or shape is None or isinstance(leaf, type):
            is_text = leaf is str or leaf is np.str_
            raise QueueError(
                f"the spec of queue {self.name!r} has {leaf!r} for a component",
                "give strings as jax.ShapeDtypeStruct((), numpy.str_)"
                if is_text
                else "give each one as jax.ShapeDtypeStruct(shape, dtype)",
                at=self.loc,
            )
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            raise QueueError(
                f"the spec of queue {self.name!r} has keys ({dtype}), which no queue holds",
                "enqueue jax.random.key_data(key), and make a key of it with jax.random.wrap_key_data",
                at=self.loc,
            )
        if np.dtype(dtype).kind in "USTO":
            raise QueueError(
                f"the spec of queue {self.name!r} has {dtype} of {shape}, and a queue holds strings of one shape",
                "give jax.ShapeDtypeStruct(shape, numpy.str_)",
                at=self.loc,
            )
        if None in shape and not padded:
            raise QueueError(
                f"the spec of queue {self.name!r} leaves a dimension open, {shape}",
                "give the dimension, or use a PaddingFIFOQueue",
                at=self.loc,
            )
        return ArrayType(np.dtype(jax.dtypes.canonicalize_dtype(dtype)), tuple(shape))

    def fitting(self, method: str, element: Any, *, are_rows: bool = False) -> list[Any]:
        """The arrays of an element, each of its component's dtype; with `are_rows`, of one element for each row.

        Raises QueueTypeError, which names the `method` that was given the element.
        """
        tree: Any
        what = f"{method} of {self.title}: element"
        element = jax.tree_util.tree_map(lambda leaf: plain_array(leaf, what), element)
        element = with_string_ids(element, lambda: leaf_names(what, element, is_list_of_strings))
        leaves, tree = jax.tree_util.tree_flatten(element, is_leaf=is_variable)
        arrays = [leaf.read() if is_variable(leaf) else leaf for leaf in leaves]
        check_numbers(arrays, lambda: leaf_names(what, element, is_variable))
        if tree == self._tree:
            arrays = [converted(a, wanted) for a, wanted in zip(arrays, self.type.components, strict=True)]
        given = [array_type_of(array).strong for array in arrays]
        extra = int(are_rows)
        rows = given[0].shape[:extra] if given else ()
        wanted = [ArrayType(type.dtype, (*rows, *type.shape)) for type in self.type.components]
        if tree != self._tree or len(rows) != extra or not all(map(ops.fits, given, wanted)):
            shown = _readable(tree, [_given_type(array) for array in arrays])
            many = ", with one dimension more in front, the same for all" if extra else ""
            has_strings = "StringIds" in str(tree) and "StringIds" not in str(self._tree)
            raise QueueTypeError(
                f"queue {self.name!r} holds {self._shown(self.type.components)} but {method} was given {shown}",
                _OF_STRINGS if has_strings else f"give it the structure, shapes and dtypes that it holds{many}",
            )
        return arrays

    def _shown(self, types: Sequence[ArrayType]) -> str:
        return str(_readable(self._tree, types))


class _Text(str):
    """A text that a container shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _readable(tree: Any, types: Sequence[ArrayType]) -> Any:
    """The pytree of these types, with `str[2]` for the ids of two strings."""

    def shown(part: Any) -> Any:
        return _Text(f"str{str(part.low).removeprefix('u32')}") if isinstance(part, StringIds) else part

    whole = jax.tree_util.tree_unflatten(tree, types)
    return jax.tree_util.tree_map(shown, whole, is_leaf=lambda part: isinstance(part, StringIds))


def _is_part_of_spec(part: Any) -> bool:
    return hasattr(part, "shape") and not isinstance(part, WideIds)


def _given_type(value: Any) -> ArrayType:
    """The type that was given, before JAX takes 64 bits for 32."""
    is_numpy = isinstance(value, np.ndarray | np.generic)
    return ArrayType(value.dtype, value.shape) if is_numpy else array_type_of(value).strong


class FIFOQueue(Queue):
    """First in, first out; at most `capacity` elements of the types in `spec`, a pytree of ShapeDtypeStructs."""

    @suggests_keywords
    def __init__(self, capacity: int, spec: Any, *, name: str | None = None) -> None:
        super().__init__(spec, QueueSettings(QueueKind.FIFO, capacity), name)


class PaddingFIFOQueue(Queue):
    """A FIFOQueue whose `spec` may leave dimensions open (`PaddedSpec`): `dequeue_many` pads with zeros to the largest.

    With open dimensions, traced code cannot dequeue, since the shape of the result is unknown.
    """

    @suggests_keywords
    def __init__(self, capacity: int, spec: Any, *, name: str | None = None) -> None:
        super().__init__(spec, QueueSettings(QueueKind.FIFO, capacity), name, padded=True)


class RandomShuffleQueue(Queue):
    """Gives a random element, and until it is closed keeps `min_after_dequeue` back to choose from.

    `seed` makes the choice the same in each run; given none, it differs.
    """

    @suggests_keywords
    def __init__(
        self, capacity: int, min_after_dequeue: int, spec: Any, *, seed: int | None = None, name: str | None = None
    ) -> None:
        if not 0 <= min_after_dequeue < capacity:
            raise QueueError(
                f"a queue of capacity {capacity} that holds {min_after_dequeue} back gives nothing",
                "give a min_after_dequeue from 0 to less than the capacity",
            )
        chosen: Any = np.random.SeedSequence().entropy if seed is None else seed
        settings = QueueSettings(QueueKind.SHUFFLE, capacity, int(min_after_dequeue), int(chosen) % 2**64)
        super().__init__(spec, settings, name)


class PriorityQueue(Queue):
    """Gives the element of the lowest priority, of equal ones the first in.

    The priority is the first component of `spec` in the order of its leaves: an int32 or int64 scalar.
    """

    @suggests_keywords
    def __init__(self, capacity: int, spec: Any, *, name: str | None = None) -> None:
        first = next(iter(jax.tree_util.tree_leaves(spec)), None)
        dtype, shape = getattr(first, "dtype", None), getattr(first, "shape", None)
        if shape != () or dtype not in (np.dtype("int32"), np.dtype("int64")):
            raise QueueError(
                f"priority queue: expected an int32 or int64 scalar as its first component, the priority, got {first}",
                "the components are the leaves of the spec; those of a dict go by its keys",
            )
        super().__init__(spec, QueueSettings(QueueKind.PRIORITY, capacity), name)
