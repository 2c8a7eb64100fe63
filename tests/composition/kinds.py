"""Every kind of state, by name: variables, containers and shards; generators, queues and accumulators."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from tests.composition.kind import FIRST, TABLE, Batch, Folded, Held, Kind, Reference, whole
from tests.composition.kinds_of_training import (
    CHAINS,
    Bags,
    Keras,
    Model,
    Slots,
    Table,
    Vocabulary,
    equinox_layer,
    nnx_layer,
)


class Numbers(Kind):
    """A variable of numbers, which each step adds to."""

    family = "variables of numbers"

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)
        self.name = f"variable {self.dtype.name}"
        self.first = np.array([0, 2, 1]).astype(self.dtype)

    def _amount(self, given: Batch) -> Any:
        return given["x"].sum().astype(self.dtype)

    def make(self, prefix: str) -> Held:
        v = dflow.Variable(lambda: jnp.asarray(self.first), name=f"{prefix}/v")

        def look(given: Batch) -> jax.Array:
            return jnp.sum(v.read().real.astype(jnp.float32))

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            v.assign_add(jnp.broadcast_to(self._amount(given), (3,)))
            return seen

        return Held(step, lambda: whole(v), {"v": v}, look)

    def reference(self) -> Reference:
        return Folded(
            self.first, lambda value, given: (value + self._amount(given), float(value.real.astype(np.float32).sum()))
        )


class Marked(Kind):
    """A variable of a dtype without sums, which each step assigns."""

    family = "variables of bool and keys"

    def __init__(self, name: str, value_of: Callable[[Any], Any], seen: Callable[[Any], Any]) -> None:
        self.name, self._value_of, self._seen = name, value_of, seen

    def make(self, prefix: str) -> Held:
        v = dflow.Variable(lambda: self._value_of(jnp.int32(100)), name=f"{prefix}/v")

        def look(given: Batch) -> jax.Array:
            return self._seen(v.read())

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            v.assign(self._value_of(given["round"][0]))
            return seen

        return Held(step, lambda: whole(v), {"v": v}, look)

    def reference(self) -> Reference:
        def write(value: Any, given: Batch) -> tuple[Any, float]:
            return self._value_of(jnp.asarray(given["round"])[0]), float(self._seen(value))

        return Folded(self._value_of(jnp.int32(100)), write, whole)


class Container(Numbers):
    """A variable in a named lifetime, beside another one of another lifetime with the same name."""

    family = "containers"

    def __init__(self) -> None:
        super().__init__(np.float32)
        self.name = "container"

    def make(self, prefix: str) -> Held:
        name = re.sub(r"[^\w.-]", "-", prefix)
        with dflow.container(f"{name}-other"):
            other = super().make("inner")
        with dflow.container(name):
            held = super().make("inner")
        held.state = lambda state=held.state: (state(), other.state())  # type: ignore[misc]
        return held

    def reference(self) -> Reference:
        reference, first = super().reference(), self.first
        reference.state = lambda state=reference.state: (state(), first)  # type: ignore[method-assign, misc]
        return reference


class Shards(Kind):
    """An array in shards on several tasks, whose rows a step looks up and adds to."""

    family = "sharded variables"

    #: Whether changed rows are marked.
    tracks = True

    def __init__(self, by: str) -> None:
        self.by, self.name = by, f"sharded by {by}"
        self.divided_otherwise = {"shards": 1 if by == "columns" else 3}  # type: ignore[misc]

    def make(self, prefix: str, shards: int = 2) -> Held:
        options = {"by": self.by, "shards": shards, "track_changes": self.tracks and self.by != "columns"}
        table = dflow.ShardedVariable(lambda: jnp.asarray(FIRST), name=f"{prefix}/table", **options)

        def look(given: Batch) -> jax.Array:
            return table.gather(given["ids"]).sum()

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            table.scatter_add(given["ids"], given["x"][:, None] * jnp.ones((1, 2), jnp.float32))
            return seen

        return Held(step, lambda: whole(table), {"table": table}, look)

    def reference(self) -> Reference:
        def write(table: Any, given: Batch) -> tuple[Any, float]:
            after = table.copy()
            np.add.at(after, given["ids"], given["x"][:, None])
            return after, float(table[given["ids"]].sum())

        return Folded(FIRST, write)


class Random(Kind):
    """A generator, which each step splits."""

    family = "generators"
    name = "generator"

    def make(self, prefix: str) -> Held:
        generator = dflow.Generator(7, name=f"{prefix}/generator")

        def step(given: Batch) -> jax.Array:
            return jax.random.uniform(generator.split())

        return Held(step, lambda: whole(generator.key), {"generator": generator})

    def reference(self) -> Reference:
        def write(key: Any, given: Batch) -> tuple[Any, float]:
            after, drawn = jax.random.split(key)
            return after, float(jax.random.uniform(drawn))

        return Folded(jax.random.key(7), write, whole)


class Queue(Kind):
    """A queue with 8 elements. Each step takes one, and enqueues the sum of that and its batch."""

    family = "queues"

    def __init__(self, kind: type[Any], element: Callable[[Any], Any], number: Callable[[Any], Any]) -> None:
        self.kind, self.name, self.element, self.number = kind, kind.__name__, element, number

    def made(self, prefix: str) -> Any:
        """Make the queue, full of the numbers 0 to 7."""
        spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.element(jnp.float32(0)))
        return self.kind(64, spec, name=f"{prefix}/queue")

    def make(self, prefix: str) -> Held:
        queue = self.made(prefix)
        for number in range(8 if int(queue.size()) == 0 else 0):  # another worker may have made it
            queue.enqueue(self.element(jnp.float32(number)))

        def state() -> Any:
            return self.content([float(self.number(queue.dequeue())) for _ in range(int(queue.size()))])

        return Held(lambda given: self.step(queue, given), state, {"queue": queue})

    def step(self, queue: Any, given: Batch) -> Any:
        """Take an element and give one; return the first."""
        taken = self.number(queue.dequeue())
        queue.enqueue(self.element(taken + given["x"].sum()))
        return taken

    def content(self, elements: list[float]) -> Any:
        """Return the elements in a form that does not depend on the order of concurrent steps."""
        return np.sort(elements)

    def written(self, elements: list[float], given: Batch) -> float:
        """Do a step on the elements of the reference; return its result."""
        taken = min(elements) if self.kind is dflow.PriorityQueue else elements[0]
        elements.remove(taken)
        elements.append(taken + float(given["x"].sum()))
        return taken

    def reference(self) -> Reference:
        return Elements(self)


class Elements(Reference):
    """The elements that a kind's queue holds."""

    def __init__(self, kind: Queue) -> None:
        self.kind, self.elements = kind, [float(number) for number in range(8)]

    def write(self, given: Batch) -> float:
        return self.kind.written(self.elements, given)

    def state(self) -> Any:
        return self.kind.content(self.elements)


class Shuffled(Queue):
    """A queue that gives a random element: a step returns the number of elements, and their sum is compared."""

    def made(self, prefix: str) -> Any:
        return self.kind(64, 0, jax.ShapeDtypeStruct((), jnp.float32), name=f"{prefix}/queue", seed=0)

    def step(self, queue: Any, given: Batch) -> Any:
        before = queue.size().astype(jnp.float32)
        super().step(queue, given)
        return before

    def content(self, elements: list[float]) -> Any:
        return np.array([len(elements), sum(elements)])

    def written(self, elements: list[float], given: Batch) -> float:
        super().written(elements, given)
        return 8.0


class Padded(Queue):
    """A queue of elements of several lengths: steps give them, and code outside of steps takes them."""

    def made(self, prefix: str) -> Any:
        return self.kind(64, dflow.PaddedSpec((None,), jnp.float32), name=f"{prefix}/queue")

    def step(self, queue: Any, given: Batch) -> Any:
        before = queue.size().astype(jnp.float32)
        queue.enqueue(given["x"])
        return before

    def written(self, elements: list[float], given: Batch) -> float:
        elements.append(float(given["x"].sum()))
        return len(elements) - 1.0


class Accumulator(Kind):
    """An accumulator; each step applies one gradient to it."""

    family = "accumulators"
    name = "accumulator"

    def make(self, prefix: str) -> Held:
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        sums = dflow.ConditionalAccumulator((spec, spec), name=f"{prefix}/sums", reduction="sum")

        def step(given: Batch) -> jax.Array:
            return sums.apply((given["x"].sum(), jnp.float32(1)), step=0).astype(jnp.float32)

        def state() -> Any:
            sums.apply((jnp.float32(0), jnp.float32(0)), step=0)  # a take waits for one
            return np.asarray(sums.take(1))

        return Held(step, state, {"sums": sums})

    def reference(self) -> Reference:
        return Folded(
            np.zeros(2, np.float32), lambda value, given: (value + np.array([given["x"].sum(), 1], np.float32), 1.0)
        )


_QUEUES = (
    Queue(dflow.FIFOQueue, lambda number: number, lambda element: element),
    Shuffled(dflow.RandomShuffleQueue, lambda number: number, lambda element: element),
    Queue(dflow.PriorityQueue, lambda number: (number.astype(jnp.int32), number), lambda element: element[1]),
    Padded(dflow.PaddingFIFOQueue, lambda number: jnp.ones(1, jnp.float32) * number, lambda element: element.sum()),
)
_NUMBERS = ("float32", "bfloat16", "float16", "float8_e5m2", "int8", "int32", "uint8", "complex64")

#: Every kind, by name: a new one is one entry here.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *map(Numbers, _NUMBERS),
        Marked("variable bool", lambda n: jnp.stack([n % 2 == 1, n > 1]), lambda v: v.sum().astype(jnp.float32)),
        Marked("variable key", lambda n: jax.random.fold_in(jax.random.key(0), n), jax.random.uniform),
        Container(),
        *map(Shards, ("rows", "modulo", "columns")),
        Table(),
        Bags(),
        Vocabulary("int64", [2**40 + n for n in range(TABLE)]),
        Vocabulary("strings", [f"user {n}" for n in range(TABLE)]),
        *map(Slots, CHAINS),
        Model("NNX model", nnx_layer),
        Model("Equinox model", equinox_layer),
        Keras(),
        Random(),
        *_QUEUES,
        Accumulator(),
    )
}
