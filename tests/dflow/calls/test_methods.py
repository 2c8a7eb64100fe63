"""`dflow.jit` of methods: each object has its own state, and is not kept alive."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


class Counter:
    """An object that is not a pytree."""

    def __init__(self, traced: list[Any] | None = None) -> None:
        self.total = dflow.Variable(jnp.zeros(2), name=f"total_{id(self)}")
        self.traced = traced if traced is not None else []

    @dflow.jit
    def add(self, x: Any, *, times: Any = 1.0) -> Any:
        """Add to the total."""
        self.traced.append(type(x))
        self.total.assign_add(x * times)
        return self.total.read()

    @classmethod
    @dflow.jit
    def double(cls, x: Any) -> Any:
        """Double."""
        return 2 * x

    @staticmethod
    @dflow.jit
    def half(x: Any) -> Any:
        """Halve."""
        return x / 2


def test_a_method_of_a_plain_object_has_that_objects_state() -> None:
    first, second = Counter(), Counter()
    np.testing.assert_array_equal(first.add(jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(first.add(jnp.ones(2), times=2.0), [3, 3])
    np.testing.assert_array_equal(second.add(jnp.ones(2)), [1, 1])
    np.testing.assert_array_equal(first.add(jnp.ones(2)), [4, 4])
    assert len(first.traced) == 2
    assert len(second.traced) == 1
    assert (float(Counter.double(2.0)), float(Counter().half(2.0))) == (4.0, 1.0)
    assert Counter.add.__doc__ == "Add to the total."
    np.testing.assert_array_equal(Counter().add(jnp.ones(2)), [1, 1])


def test_a_method_does_not_keep_its_object_alive() -> None:
    counter = Counter()
    counter.add(jnp.ones(2))
    alive, variable = weakref.ref(counter), weakref.ref(counter.total)
    del counter
    gc.collect()
    assert alive() is None
    assert variable() is None


def test_a_copied_object_does_not_run_the_methods_of_the_first() -> None:
    import copy

    first = Counter()
    first.add(jnp.ones(2))
    second = copy.copy(first)
    second.total = dflow.Variable(jnp.full(2, 5.0))
    np.testing.assert_array_equal(second.add(jnp.ones(2)), [6, 6])
    np.testing.assert_array_equal(first.total, [1, 1])


def test_a_bound_method_is_a_value_like_others() -> None:
    import copy

    first, second = Counter(), Counter()
    assert first.add == first.add != second.add
    assert {first.add: 1}[first.add] == 1
    assert (first.add.__name__, first.add.__doc__, first.add.__module__) == ("add", "Add to the total.", __name__)
    np.testing.assert_array_equal(copy.copy(first.add)(jnp.ones(2)), [1, 1])
    traces = []

    @functools.partial(dflow.jit, static_argnums=0)
    def apply(method: Any, x: Any) -> Any:
        traces.append(1)
        return method(x)

    for _ in range(3):
        apply(first.add, jnp.ones(2))
    assert (traces, first.total.read().tolist()) == ([1], [4, 4])


def test_a_bound_method_is_exported_drawn_and_placed_like_a_function() -> None:
    counter, spec = Counter(), dflow.spec((2,), jnp.float32)
    assert "add(x: f32[2])" in str(dflow.export(counter.add, spec))
    assert "var.assign_add(%" in str(dflow.graph(counter.add, jnp.ones(2)))
    assert counter.add.lower(jnp.ones(2)).as_text().count("func.func public") == 1


class Slotted:
    """An object without weak references."""

    __slots__ = ("total",)

    @dflow.jit
    def double(self, x: Any) -> Any:
        """Twice as much."""
        return x * 2


def test_a_method_of_an_object_without_weak_references_says_what_to_do() -> None:
    with pytest.raises(dflow.DflowError, match=r'Slotted takes no weak references[\s\S]*add "__weakref__"'):
        Slotted().double(1.0)


@jax.tree_util.register_pytree_node_class
class Scale:
    """An object that is a pytree: its arrays are arguments."""

    def __init__(self, factor: Any) -> None:
        self.factor = factor

    def tree_flatten(self) -> Any:
        """Return the one array."""
        return (self.factor,), None

    @classmethod
    def tree_unflatten(cls, _: Any, leaves: Any) -> Scale:
        """Rebuild the object."""
        return cls(*leaves)

    @dflow.jit
    def times(self, x: Any) -> Any:
        """Multiply."""
        return self.factor * x


def test_a_method_of_a_pytree_takes_its_arrays_as_arguments() -> None:
    scale = Scale(jnp.float32(2.0))
    assert float(scale.times(3.0)) == 6.0
    scale.factor = jnp.float32(5.0)
    assert float(scale.times(3.0)) == 15.0
