"""Generators, queues and accumulators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from tests.composition.kind import Batch, Folded, Held, Kind, Reference, whole


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
            np.zeros(2, np.float32),
            lambda value, given: (value + np.array([given["x"].sum(), 1], np.float32), 1.0),
        )
