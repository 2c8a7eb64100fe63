"""Programs with equal computations share an export; others do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex

import dflow
from dflow.lowering.programs.discharge import Discharged, discharge
from dflow.lowering.programs.program import load_program
from dflow.lowering.programs.shared_exports import computation, shared_exports

F32 = jax.ShapeDtypeStruct((3,), jnp.float32)


def program(fn: Callable[..., Any], *structs: Any) -> Discharged:
    return discharge(dflow.graph(dflow.jit(fn), *structs).graph)


def scaled(by: Any) -> Callable[[Any], Any]:
    return lambda x: jnp.sin(x) * by


def alike(one: Discharged, other: Discharged) -> bool:
    """Return whether two living programs may share an export."""
    return computation(one) == computation(other)


@pytest.mark.parametrize("place", [0, 1])
def test_names_and_lines_do_not_matter(place: int) -> None:
    variables = [dflow.Variable(jnp.zeros(3), name=name) for name in ("one", "other")]

    def first(x: Any) -> None:
        variables[0].assign_add(-0.1 * x)

    def second(step: Any) -> None:
        moved = -0.1 * step
        variables[place].assign_add(moved)

    assert alike(program(first, F32), program(second, F32))


def test_a_shared_export_computes_the_same() -> None:
    export, one, other = shared_exports(), program(lambda x: x * 2, F32), program(lambda y: y * 2, F32)
    assert export(one) is export(other)
    np.testing.assert_array_equal(load_program(export(other), 0)(jnp.ones(3))[0], [2, 2, 2])


@pytest.mark.parametrize(("shape", "dtype"), [((4,), jnp.float32), ((3,), jnp.bfloat16)])
def test_types_matter(shape: tuple[int, ...], dtype: Any) -> None:
    assert not alike(program(scaled(2.0), F32), program(scaled(2.0), jax.ShapeDtypeStruct(shape, dtype)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(2.0), scaled(2.5)),
        (scaled(2.0), lambda x: jnp.cos(x) * 2.0),
        (scaled(2.0), lambda x: jnp.sin(x) * x),
        (scaled(2.0), lambda x: (jnp.sin(x) * 2.0, x)),
        (scaled(2.0), lambda x, y: jnp.sin(x) * 2.0),
        (lambda x: x - 0.0, lambda x: x - -0.0),
        (lambda x, y: x - y, lambda x, y: y - x),
        (lambda x, y: (x, y + 1), lambda x, y: (y, y + 1)),
        (lambda x: jax.lax.reduce_precision(x, 8, 7), lambda x: jax.lax.reduce_precision(x, 8, 10)),
        (lambda x: jax.lax.cumsum(x, 0), lambda x: jax.lax.cumsum(x, reverse=True)),
    ],
)
def test_small_differences_matter(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    mine, others = (program(fn, *[F32] * fn.__code__.co_argcount) for fn in (one, other))
    assert not alike(mine, others)


@dataclass(frozen=True)
class Settings:
    """A parameter of a primitive that compares equal to parameters with another meaning."""

    rate: Any
    note: list[str] = field(default_factory=list, compare=False)


@dataclass(frozen=True, eq=False)
class Own:
    """A parameter that is equal only to itself."""

    rate: Any


damp_p = jex.Primitive("damp")
damp_p.def_abstract_eval(lambda x, **_: x)


@pytest.mark.parametrize("wrapped", [lambda by: by, lambda by: (1, by), Settings, lambda by: {by}])
@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), (np.float32(0.0), np.float32(-0.0))])
def test_parameters_that_compare_equal_are_told_apart(wrapped: Callable[[Any], Any], one: Any, other: Any) -> None:
    def damped(rate: Any) -> Discharged:
        by = wrapped(rate)
        by = frozenset(by) if isinstance(by, set) else Settings(by)
        return program(lambda x: damp_p.bind(x, by=by), F32)

    assert alike(damped(one), damped(one))
    assert not alike(damped(one), damped(other))


def test_a_parameter_that_equals_itself_alone_is_compared_as_it_says() -> None:
    own = [Own(1.0), Own(1.0)]
    one, same, other = (program(lambda x, by=by: damp_p.bind(x, by=by), F32) for by in (own[0], *own))
    assert alike(one, same)
    assert not alike(one, other)


def test_an_update_is_no_read() -> None:
    variable = dflow.Variable(jnp.zeros(3), name="w")
    assert not alike(program(lambda: variable.read() + 1.0), program(lambda: variable.assign_add(jnp.ones(3))))


def test_a_trace_context_matters() -> None:
    def under_scope(x: Any) -> Any:
        with set_xla_metadata(kind="other"):
            return jnp.sin(x) * 2.0

    assert not alike(program(under_scope, F32), program(scaled(2.0), F32))


def test_what_cannot_be_compared_has_its_own_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.lowering.programs.shared_exports.computation", lambda program: None)
    export, double = shared_exports(), program(lambda x: x * 2, F32)
    assert export(double) is not export(double)
