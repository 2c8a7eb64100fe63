"""Variables of each dtype, in containers, and in shards."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from tests.composition.kind import FIRST, Batch, Folded, Held, Kind, Reference, whole


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
