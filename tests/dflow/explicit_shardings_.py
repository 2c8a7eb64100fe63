"""Variables on meshes with `Auto` and `Explicit` axes, and inside `shard_map`, beside `jax.jit` with plain arrays.

A read has its sharding in its type, as an argument of `jax.jit` does. A function's results and the variables that it
writes are sharded as JAX shards them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import dflow
from dflow.tracing.syntax.text import parse, text
from tests.dflow.mesh_shardings import AUTO, EXPLICIT, ROWS, WHOLE, P, X, same, spread

SHARDINGS = {
    "explicit rows": ROWS,
    "explicit whole": WHOLE,
    "explicit both": spread(P("d", "m"), EXPLICIT, EXPLICIT),
    "explicit rows by two": spread(P(("d", "m")), EXPLICIT, EXPLICIT),
    "explicit columns": spread(P(None, "m"), EXPLICIT, EXPLICIT),
    "mixed": spread(P("d", "m"), AUTO, EXPLICIT),
    "auto rows": spread(P("d"), AUTO),
    "auto whole": spread(P(), AUTO),
}
every_sharding = pytest.mark.parametrize("sharding", SHARDINGS.values(), ids=SHARDINGS)


class Held:
    """A stand-in for a variable in a function for `jax.jit`: it holds a value and has a variable's methods."""

    def __init__(self, value: Any, sharding: NamedSharding) -> None:
        self.value, self.sharding = value, sharding
        self._explicit = {"out_sharding": sharding} if EXPLICIT in sharding.mesh.axis_types else {}

    def read(self) -> Any:
        return self.value

    def assign(self, value: Any) -> None:
        move = jax.sharding.reshard if self._explicit else jax.lax.with_sharding_constraint
        self.value = move(value, jax.typeof(self.value).sharding if self._explicit else self.sharding)

    def assign_add(self, delta: Any) -> None:
        self.assign(self.value + delta)

    def scatter_add(self, indices: Any, rows: Any) -> None:
        self.value = self.value.at[indices].add(rows, **self._typed())

    def scatter_update(self, indices: Any, rows: Any) -> None:
        self.value = self.value.at[indices].set(rows, **self._typed())

    def _typed(self) -> dict[str, Any]:
        return {"out_sharding": jax.typeof(self.value).sharding} if self._explicit else {}


@every_sharding
def test_a_read_has_its_sharding_in_its_type(sharding: NamedSharding) -> None:
    seen, want = [], []
    jax.jit(lambda x: want.append(jax.typeof(x)))(jax.device_put(X, sharding))
    for initial, options in [
        (jax.device_put(X, sharding), {}),
        (X, {"sharding": sharding}),
        (lambda: jnp.asarray(X), {"sharding": sharding}),
        (lambda: 2 * jax.device_put(X, sharding), {}),
    ]:
        w = dflow.Variable(initial, **options)
        dflow.jit(lambda w=w: seen.append(jax.typeof(w.read())))()
        assert jax.typeof(w.read()).sharding == want[0].sharding
    assert [str(aval) for aval in seen] == [str(want[0])] * 4
    if EXPLICIT in sharding.mesh.axis_types:
        assert [aval.sharding for aval in seen] == [want[0].sharding] * 4


#: Programs over a variable or its stand-in, and an argument with the same sharding.
PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "reads": lambda w, x: (w.read() * 2, (w.read() + x).sum()),
    "assigns": lambda w, x: w.assign(x + 1),
    "assigns zeros": lambda w, x: w.assign(jnp.zeros((16, 4))),
    "adds and reads": lambda w, x: (w.assign_add(x), w.read() * x)[1],
    "adds what lies nowhere": lambda w, x: w.assign_add(jnp.broadcast_to(jnp.arange(4.0), (16, 4))),
    "scatters": lambda w, x: w.scatter_add(jnp.array([1, 5, 5]), jnp.ones((3, 4))),
    "scatters and reads": lambda w, x: (w.scatter_update(jnp.array([1, 9]), jnp.ones((2, 4))), w.read() + x)[1],
    "transposes": lambda w, x: (w.read().T, jnp.exp(w.read()).mean(0)),
    "reduces": lambda w, x: (w.read() * x).sum(1),
}


@every_sharding
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_step_gives_and_leaves_what_jax_does(program: Callable[[Any, Any], Any], sharding: NamedSharding) -> None:
    @functools.partial(jax.jit, keep_unused=True)
    def plain(value: Any, x: Any) -> Any:
        held = Held(value, sharding)
        return program(held, x), held.value

    value, x = jax.device_put(X, sharding), jax.device_put(X + 1, sharding)
    w = dflow.Variable(value)
    step = dflow.jit(lambda x: program(w, x))
    for _ in range(3):
        given, value = plain(value, x)
        same(step(x), given)
        np.testing.assert_allclose(w, value, rtol=1e-5)
        assert w.read().sharding.is_equivalent_to(sharding, 2)
        assert w.read().addressable_shards[0].data.shape == sharding.shard_shape((16, 4))


@pytest.mark.parametrize("given", [ROWS, SHARDINGS["auto rows"], SHARDINGS["mixed"]], ids=["rows", "auto", "mixed"])
@every_sharding
def test_an_update_at_once_leaves_the_value_as_it_is_spread(sharding: NamedSharding, given: NamedSharding) -> None:
    w = dflow.Variable(X, sharding=sharding)
    x = jax.device_put(X, given)
    w.assign(x)
    w.scatter_add(np.array([0, 2]), np.ones((2, 4), np.float32))
    w.assign_add(x)
    np.testing.assert_array_equal(w, 2 * X + np.isin(np.arange(16), [0, 2])[:, None])
    assert w.read().sharding.is_equivalent_to(sharding, 2)


def test_shard_map_takes_a_read_by_its_own_spec() -> None:
    w = dflow.Variable(X, sharding=ROWS)

    def halved(value: Any) -> Any:
        assert jax.typeof(value).shape == (2, 4)
        return value / 2

    by_shards = jax.shard_map(halved, mesh=ROWS.mesh, in_specs=P("d"), out_specs=P("d"))
    step = dflow.jit(lambda: w.assign(by_shards(w.read())))
    step()
    step()
    same(w.read(), jax.device_put(X / 4, ROWS))


@every_sharding
def test_a_variable_passed_to_jax_is_spread_as_it_is(sharding: NamedSharding) -> None:
    value = jax.device_put(X, sharding)
    for w in (dflow.Variable(value), dflow.Variable(X, sharding=sharding)):
        assert w.sharding is not None
        assert w.sharding.is_equivalent_to(sharding, 2)
        same(jax.jit(lambda x: x * 2)(w), jax.jit(lambda x: x * 2)(value))
        same(jnp.sin(w), jnp.sin(value))


@pytest.mark.parametrize("spec", [None, P(), P("m"), P("d"), P(None, "d")], ids=str)
def test_a_read_after_an_assign_has_the_sharding_of_the_variable(spec: Any) -> None:
    place = spread(P("d"), EXPLICIT, EXPLICIT)
    w, y = dflow.Variable(0 * X, sharding=place), jax.device_put(X, place)

    @dflow.jit
    def step(x: Any, y: Any) -> Any:
        w.assign(x + 1)
        return w.read() * y

    x = X if spec is None else jax.device_put(X, NamedSharding(place.mesh, spec))
    same(step(x, y), jax.device_put((X + 1) * X, place))


def test_in_a_shard_map_a_variable_that_all_devices_hold_is_read_and_written() -> None:
    w, total = dflow.Variable(jnp.ones((4, 2)), sharding=WHOLE), dflow.Variable(0.0, sharding=WHOLE)
    v = jax.device_put(jnp.ones((4, 2)), WHOLE)

    def shard(x: Any) -> Any:
        assert not jax.typeof(w.read()).sharding.mesh.explicit_axes
        total.assign_add(jax.lax.psum(x.sum(), "d"))
        return x @ w

    x = jax.device_put(X, ROWS)
    ours = dflow.jit(jax.shard_map(shard, mesh=ROWS.mesh, in_specs=P("d"), out_specs=P("d")))
    theirs = jax.shard_map(lambda x, v: x @ v, mesh=ROWS.mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    same(ours(x), jax.jit(theirs)(x, v))
    assert float(total) == X.sum()
    assert jax.typeof(total.read()) == jax.typeof(jax.device_put(jnp.float32(0), WHOLE))


@pytest.mark.parametrize(
    "used",
    [lambda w: w.read().sum(), lambda w: w[jnp.array([0])].sum(), lambda w: w.assign_add(jnp.ones((16, 4))) or 0.0],
    ids=["read", "looked up", "written"],
)
def test_in_a_shard_map_a_variable_that_is_divided_over_it_is_refused(used: Callable[[Any], Any]) -> None:
    w = dflow.Variable(X, sharding=ROWS, name="w")
    step = jax.shard_map(lambda x: x + used(w), mesh=ROWS.mesh, in_specs=P("d"), out_specs=P("d"))
    with pytest.raises(
        dflow.VariableError,
        match=r"'w' holds f32\[16@d,4\]\{d=8\} and is used inside a shard_map over 'd'[\s\S]*explicit_shardings_.py"
        r"[\s\S]*pass its value to the shard_map, w.read\(\)",
    ):
        dflow.jit(step)(jax.device_put(X, ROWS))


def test_in_a_shard_map_over_another_axis_a_read_keeps_the_rest_of_its_sharding() -> None:
    columns = spread(P(None, "m"), EXPLICIT, EXPLICIT)
    w, seen = dflow.Variable(X, sharding=columns), []

    def shard(x: Any) -> Any:
        seen.append(str(jax.typeof(w.read())))
        return x + w.read()[:4]

    step = jax.shard_map(shard, mesh=columns.mesh, in_specs=P("d"), out_specs=P("d"), axis_names={"d"})
    x = jax.device_put(X, spread(P("d", "m"), EXPLICIT, EXPLICIT))
    np.testing.assert_array_equal(dflow.jit(step)(x), X + np.tile(X[:4], (4, 1)))
    assert seen[0] == "float32[16,4@m]"


@every_sharding
def test_loops_and_branches_carry_the_sharding(sharding: NamedSharding) -> None:
    w, seen = dflow.Variable(X, sharding=sharding), []
    x = jax.device_put(X, sharding)

    @dflow.jit
    def step(x: Any, is_first: Any) -> Any:
        def turn(_: Any, total: Any) -> Any:
            seen.append(jax.typeof(w.read()))
            w.assign_add(x)
            w.scatter_add(jnp.array([3]), jnp.ones((1, 4)))
            return total + w.read().sum()

        total = jax.lax.fori_loop(0, 3, turn, 0.0)
        jax.lax.cond(is_first, lambda: w.assign(w * 2), lambda: w.assign(jnp.zeros((16, 4))))
        jax.lax.while_loop(lambda n: n < 2, lambda n: w.assign_add(x) or n + 1, 0)
        return total

    want = X
    for is_first in (True, False):
        after = [want + times * X + times * np.eye(16, dtype=np.float32)[3][:, None] for times in (1, 2, 3)]
        np.testing.assert_allclose(step(x, is_first), sum(value.sum() for value in after), rtol=1e-4)
        want = (after[-1] * 2 if is_first else 0 * X) + 2 * X
        np.testing.assert_allclose(w, want, rtol=1e-5)
        assert w.read().sharding.is_equivalent_to(sharding, 2)
    assert {str(aval) for aval in seen} == {str(jax.typeof(x))}


@every_sharding
@pytest.mark.parametrize("given", ["array", "type"])
def test_a_function_compiled_ahead(sharding: NamedSharding, given: str) -> None:
    w = dflow.Variable(X, sharding=sharding)
    x = jax.device_put(X, sharding)
    step = dflow.jit(lambda x: (w.assign_add(x), w.read() * x)[1])
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    compiled = step.lower(x if given == "array" else shape).compile()
    for times in (2, 3):
        same(compiled(x), jax.jit(lambda x, n: x * n * x)(x, float(times)))
        np.testing.assert_allclose(w, X * times, rtol=1e-5)
    assert step.eval_shape(x).sharding == jax.eval_shape(lambda x: x * x, x).sharding


@every_sharding
def test_a_step_of_several_programs(sharding: NamedSharding) -> None:
    w = dflow.Variable(X, sharding=sharding)
    x = jax.device_put(X, sharding)
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.float32))

    @dflow.jit
    def step(x: Any) -> Any:
        queue.enqueue(x[0].sum() if sharding.is_fully_replicated else x.sum())
        scale = queue.dequeue() * 0 + 1
        w.assign_add(x * scale)
        return w.read() * scale

    for times in (2, 3):
        same(step(x), jax.jit(lambda x, n: x * n)(x, float(times)))
        np.testing.assert_allclose(w, X * times, rtol=1e-5)


#: `in_shardings` and `out_shardings`, the sharding in the trace, and the argument.
OPTIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "in": ({"in_shardings": ROWS}, None),
    "in, given so": ({"in_shardings": ROWS}, ROWS),
    "in and out": ({"in_shardings": (ROWS,), "out_shardings": WHOLE}, None),
    "out": ({"out_shardings": ROWS}, None),
    "out, given so": ({"out_shardings": WHOLE}, ROWS),
    "out over an auto mesh": ({"out_shardings": spread(P(), AUTO)}, ROWS),
    "in over an auto mesh": ({"in_shardings": spread(P("d"), AUTO)}, None),
}


@pytest.mark.parametrize(("options", "place"), OPTIONS.values(), ids=OPTIONS)
def test_shardings_in_and_out(options: dict[str, Any], place: Any) -> None:
    x = X if place is None else jax.device_put(X, place)
    count, ours, theirs = dflow.Variable(0), [], []

    def fn(x: Any) -> Any:
        ours.append(jax.typeof(x))
        count.assign_add(1)
        return x * 2 + 1

    same(dflow.jit(fn, **options)(x), jax.jit(lambda x: (theirs.append(jax.typeof(x)), x * 2 + 1)[1], **options)(x))
    assert int(count) == 1
    assert str(ours[-1]) == str(theirs[0])


def test_an_argument_is_not_moved_to_what_in_shardings_say() -> None:
    count, x = dflow.Variable(0), jax.device_put(X, WHOLE)
    with pytest.raises(ValueError, match="does not match the sharding on the respective arg"):
        jax.jit(lambda x: x * 2, in_shardings=ROWS)(x)
    with pytest.raises(
        dflow.DeviceError,
        match=r"an argument is f32\[16,4\]\{d=8\}, and its sharding does not match in_shardings, P\('d', None\)"
        r"\n  at \S*explicit_shardings_.py:\d+\n  pass jax.device_put",
    ):
        dflow.jit(lambda x: count.assign_add(1) or x * 2, in_shardings=ROWS)(x)


@every_sharding
def test_what_was_saved_is_restored_as_its_variable_is_spread(sharding: NamedSharding, tmp_path: Path) -> None:
    w = dflow.Variable(X, sharding=sharding, name="w")
    dflow.save(tmp_path / "saved", [w])
    double = dflow.jit(lambda w: w.read() * 2)
    for other in (sharding, SHARDINGS["mixed"], WHOLE):
        again = dflow.Variable(0 * X, sharding=other, name="w")
        dflow.restore(tmp_path / "saved", [again])
        same(again.read(), jax.device_put(X, other))
        same(double(again), jax.jit(lambda x: x * 2)(jax.device_put(X, other)))


@pytest.mark.parametrize("is_traced", [False, True], ids=["at once", "traced"])
@pytest.mark.parametrize("update", ["assign", "assign_add"])
def test_a_variable_on_no_mesh_takes_no_value_that_is_divided(update: str, is_traced: bool) -> None:
    w = dflow.Variable(X, name="w")
    write = dflow.jit(getattr(w, update)) if is_traced else getattr(w, update)
    with pytest.raises(
        dflow.VariableShapeError,
        match=r"'w' is spread over no mesh, but is written a value of f32\[16@d,4\]\{d=8\}\n  at [\s\S]*sharding=",
    ):
        write(jax.device_put(X, ROWS))
    np.testing.assert_array_equal(w, X)


def test_a_variable_on_no_mesh_takes_a_value_that_all_devices_hold() -> None:
    mean = dflow.Variable(0.0)
    step = dflow.jit(lambda x: mean.assign(0.5 * mean + x.mean()))
    for _ in range(3):
        step(jax.device_put(X, ROWS))
    np.testing.assert_allclose(mean, X.mean() * 1.75, rtol=1e-6)


def test_a_lookup_says_how_its_rows_are_spread() -> None:
    table, ids = dflow.Variable(X, sharding=ROWS), jnp.array([1, 5, 5])
    with pytest.raises(Exception, match="out_sharding") as caught:
        dflow.jit(lambda ids: table[ids])(ids)
    assert "variable.read().at[indices].get(out_sharding=sharding)" in "".join(caught.value.__notes__)

    @dflow.jit
    def step(ids: Any) -> Any:
        def loss() -> Any:
            return (table.read().at[ids].get(out_sharding=WHOLE) ** 2).sum()

        [gradient] = dflow.grad(loss, [table])()
        assert str(jax.typeof(gradient)) == "float32[16@d,4]"
        table.assign_sub(gradient)

    step(ids)
    want = X - jax.grad(lambda x: (x[ids] ** 2).sum())(X)
    np.testing.assert_allclose(table, want, rtol=1e-5)
    assert table.read().sharding.is_equivalent_to(ROWS, 2)


def test_the_text_of_a_graph_has_the_shardings() -> None:
    w = dflow.Variable(X, sharding=SHARDINGS["mixed"], name="w")
    graph = dflow.graph(dflow.jit(w.assign_add), jax.device_put(X, SHARDINGS["mixed"])).graph
    head = "graph(%w: ref<f32[16,4@m]{d=4:auto m=2}>, %delta: f32[16,4@m]{d=4:auto m=2}) {"
    assert text(graph).startswith(head)
    assert text(parse(text(graph))) == text(graph)


def test_an_export_runs_on_one_device_or_is_refused(tmp_path: Path) -> None:
    w = dflow.Variable(X, sharding=ROWS, name="w")
    exported = dflow.export(lambda x: w.read() * x, jax.ShapeDtypeStruct(X.shape, X.dtype), platforms=("cpu",))
    exported.save(tmp_path / "export")
    np.testing.assert_array_equal(dflow.load(tmp_path / "export")(X), X * X)
    with pytest.raises(dflow.ExportError, match=r"reshard spreads over 8 devices \(d: 8\)"):
        dflow.export(w.assign, jax.ShapeDtypeStruct(X.shape, X.dtype), platforms=("cpu",))


def test_run_at_once_a_function_leaves_the_same() -> None:
    w = dflow.Variable(X, sharding=ROWS)
    with dflow.eager():
        dflow.jit(w.assign_add)(jax.device_put(X, ROWS))
    same(w.read(), jax.device_put(2 * X, ROWS))


def test_a_mesh_in_force_changes_nothing() -> None:
    w = dflow.Variable(X, sharding=ROWS)
    with jax.set_mesh(ROWS.mesh):
        step = dflow.jit(lambda x: (w.assign_add(x), jax.sharding.reshard(w.read(), P()))[1])
        same(step(jax.device_put(X, ROWS)), jax.device_put(2 * X, WHOLE))
    same(w.read(), jax.device_put(2 * X, ROWS))
