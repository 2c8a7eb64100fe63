"""Exports saved and loaded: the same results and the same state, by name, with their structure, for any platform."""

from __future__ import annotations

import functools
import inspect
import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow

Pair = namedtuple("Pair", "loss rest")
BATCH = dflow.spec("b, 3", jnp.float32)
BATCHES = [np.linspace(-1, 1, 3 * size, dtype=np.float32).reshape(size, 3) for size in (2, 5, 2)]


def loaded(exported: dflow.Exported, path: Path) -> dflow.Loaded:
    """Return the functions loaded from a directory."""
    return dflow.load(exported.save(path / "made"), prefix="loaded/")


def same(one: Any, other: Any) -> None:
    """Assert that two pytrees have the same structure and the same bits."""
    # Compared as text, since a loaded named tuple is an instance of another class.
    assert str(jax.tree_util.tree_structure(one)) == str(jax.tree_util.tree_structure(other))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (a, b)


class Program:
    """A function over variables, and the arguments of three calls."""

    def __init__(self, fn: Callable[..., Any], variables: Any, specs: Any = (BATCH,), calls: Any = BATCHES) -> None:
        self.fn, self.specs = fn, specs
        self.calls = [call if isinstance(call, tuple) else (call,) for call in calls]
        self.variables = variables


def with_an_optimizer() -> Program:
    w = dflow.Variable(jnp.full((3, 4), 0.1), name="w")
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), [w], name="adam")

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.mean((x @ w - 1) ** 2), [w])()
        optimizer.apply(gradients)
        return value

    return Program(step, [w])


def with_random_state() -> Program:
    generator, key = dflow.Generator(3, name="generator"), dflow.Variable(jax.random.key(1), name="key")

    def noisy(x: Any) -> Any:
        following, now = jax.random.split(key.read())
        key.assign(following)
        return x + jax.random.normal(generator.split(), x.shape) * jax.random.uniform(now), now

    return Program(noisy, [generator.key, key])


def with_structure() -> Program:
    w = dflow.Variable(jnp.ones(3), name="w")

    def nest(batch: Any, state: Any, *, rate: Any) -> Any:
        w.assign_add(rate * batch["x"].sum(0))
        return Pair(batch["x"] * rate, [None, (w, {2: state.loss, 10: batch["y"]}), OrderedDict(z=w.read(), a=rate)])

    return Program(
        functools.partial(nest, rate=jnp.float32(0.5)),
        [w],
        ({"x": BATCH, "y": dflow.spec("b", jnp.int32)}, Pair(dflow.spec("", jnp.float32), None)),
        [({"x": x, "y": np.arange(len(x), dtype=np.int32)}, Pair(np.float32(2), None)) for x in BATCHES],
    )


def with_variables_as_arguments() -> Program:
    model = {"w": dflow.Variable(jnp.ones(3), name="w"), "b": dflow.Variable(0.5, name="b")}

    def apply(model: Any, x: Any) -> Any:
        model["b"].assign_add(1.0)
        return x @ model["w"] + model["b"], model

    return Program(functools.partial(dflow.jit(apply), model), list(model.values()))


PROGRAMS = [with_an_optimizer, with_random_state, with_structure, with_variables_as_arguments]


@pytest.mark.parametrize("make", PROGRAMS)
def test_what_is_loaded_gives_what_the_function_gives_and_leaves_the_same_state(make: Any, tmp_path: Path) -> None:
    program = make()
    exported = dflow.export({"run": (program.fn, *program.specs)})
    here, there = dflow.jit(program.fn), loaded(exported, tmp_path)
    for call in program.calls:
        expected, given = here(*call), there.run(*call)
        same(dflow.read(given), dflow.read(expected))
    for name, variable in exported.variables.items():
        same(there.variables[name].read(), variable.read())
        assert there.variables[name] is not variable


def test_a_program_is_made_for_platforms_that_are_not_here() -> None:
    program = with_random_state()
    exported = dflow.export({"run": (program.fn, *program.specs)}, platforms=("cuda", "tpu"))
    assert "stablehlo" in exported.mlir_module(platform="tpu")


DTYPES = ["bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16"]
DTYPES += ["float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]


def test_state_and_arguments_of_every_dtype_come_back(tmp_path: Path) -> None:
    held = {name: dflow.Variable(jnp.ones(2, name), name=name) for name in DTYPES}

    def swap(given: Any) -> Any:
        before = dflow.read(held)
        dflow.assign(held, given)
        return before

    zeros = {name: jnp.zeros(2, name) for name in DTYPES}
    there = loaded(dflow.export(swap, zeros), tmp_path)
    same(there.swap(zeros), {name: jnp.ones(2, name) for name in DTYPES})
    same(dflow.read(there.variables), zeros)


def test_the_values_are_those_of_the_moment_it_is_saved(tmp_path: Path) -> None:
    w = dflow.Variable(1.0, name="w")
    exported = dflow.export(w.read)
    w.assign(2.0)
    before = dflow.load(exported.save(tmp_path / "made"), prefix="a/")
    w.assign(3.0)
    after = dflow.load(exported.save(tmp_path / "made", overwrite=True), prefix="b/")
    assert (float(before()), float(after.read())) == (2.0, 3.0)


def big(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (200, 200))


OUTER, INNER = big(0), np.asarray(big(1))


@jax.jit
def inner(x: Any) -> Any:
    return x @ INNER


def with_constants(x: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return inner(carry) @ OUTER / 200, None

    x, _ = jax.lax.scan(body, x, None, length=2)
    x = jax.lax.cond(x.sum() > 0, inner, lambda x: x, x)
    x = jax.lax.fori_loop(0, 2, lambda _, x: inner(x) / 200, x)
    return jax.checkpoint(inner)(x)


def test_large_arrays_stand_beside_the_code_also_those_inside_of_inner_functions(tmp_path: Path) -> None:
    exported = dflow.export({"one": (with_constants, dflow.spec("b, 200", jnp.float32)), "two": (inner, big(2))})
    path = exported.save(tmp_path / "made")
    programs = [file.stat().st_size for file in (path / "programs").iterdir()]
    assert max(programs) < 20_000 < OUTER.nbytes
    assert "constants\n  OUTER: f32[200,200]\n  INNER: f32[200,200]" in str(exported)
    assert {entry.name for entry in (path / "constants").iterdir() if entry.is_dir()} == {"OUTER", "INNER"}
    there = dflow.load(path)
    same(there.one(big(3)[:4]), dflow.jit(with_constants)(big(3)[:4]))
    same(there.two(big(2)), inner(big(2)))


def test_large_arrays_inside_of_a_function_with_its_own_derivative_stay_in_it(tmp_path: Path) -> None:
    @jax.custom_jvp
    def scaled(x: Any) -> Any:
        return inner(x)

    scaled.defjvps(lambda tangent, _, x: 2 * tangent)
    exported = dflow.export({"run": (lambda x: (scaled(x) * OUTER).sum(), OUTER)}, vjp_order=1)
    assert "constants\n  OUTER: f32[200,200]" in str(exported)
    assert "INNER" not in str(exported)
    there = loaded(exported, tmp_path)
    same(there(OUTER), jax.jit(lambda x: (scaled(x) * OUTER).sum())(OUTER))
    np.testing.assert_allclose(jax.grad(there)(OUTER), 2 * OUTER, rtol=1e-6)


def test_a_loaded_function_is_called_as_the_function_was(tmp_path: Path) -> None:
    @functools.partial(dflow.jit, static_argnames="scale", donate_argnames="x")
    def fn(x: Any, y: Any, *, scale: int, shift: Any) -> Any:
        return (x + y) * scale + shift

    there = loaded(dflow.export(fn, BATCH, BATCH, scale=3, shift=dflow.spec("", jnp.float32)), tmp_path)
    assert str(inspect.signature(there.fn)) == "(x, y, *, shift)"
    assert there.fn.__doc__ == "fn(x: f32[b,3], y: f32[b,3], *, shift: f32[]) -> f32[b,3]"
    x = jnp.ones((2, 3))
    same(there(x, y=BATCHES[0], shift=1), (1 + jnp.asarray(BATCHES[0])) * 3 + 1)
    assert x.is_deleted()
    with pytest.raises(TypeError, match="leave out scale, fixed when it was exported"):
        there(x=BATCHES[0], y=BATCHES[0], shift=1.0, scale=3)


def test_what_is_loaded_composes_with_compiled_functions_derivatives_and_variables(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.full(3, 2.0), name="w")

    def loss(x: Any) -> Any:
        return ((x * w) ** 2).sum()

    there = loaded(dflow.export(loss, BATCH, vjp_order=1), tmp_path)
    own = dflow.Variable(jnp.full(3, 2.0), name="own")

    @dflow.jit
    def step(x: Any) -> Any:
        [gradient], by_x = dflow.grad(lambda x: there(x) + own[0], list(there.variables.values()), argnums=0)(x)
        there.variables["w"].assign_sub(0.1 * gradient)
        return by_x

    x = jnp.asarray(BATCHES[0])
    by_x = step(x)
    np.testing.assert_allclose(by_x, 8 * x)
    np.testing.assert_allclose(there.variables["w"], 2 - 0.1 * (2 * x**2 * 2).sum(0), rtol=1e-6)


def test_what_was_loaded_and_used_is_saved_or_exported_again_as_it_is_then(tmp_path: Path) -> None:
    program = with_an_optimizer()
    here = dflow.jit(program.fn)
    there = loaded(dflow.export({"run": (program.fn, *program.specs)}), tmp_path)
    here(*program.calls[0])
    there.run(*program.calls[0])
    saved = dflow.load(there.save(tmp_path / "saved"), prefix="saved/")
    again = dflow.load(dflow.export({"run": (there.run, *program.specs)}).save(tmp_path / "again"), prefix="again/")
    assert set(saved.variables) == set(there.variables)
    assert set(again.variables) == {f"loaded/{name}" for name in there.variables}
    for call in program.calls[1:]:
        expected = dflow.read(here(*call))
        same(dflow.read(saved.run(*call)), expected)
        same(dflow.read(again.run(*call)), expected)


def test_the_state_of_an_export_is_a_checkpoint_and_that_of_what_is_loaded_can_be_saved(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones(3), name="w")
    optimizer = dflow.Optimizer(optax.sgd(0.5, momentum=0.5), [w], name="sgd")
    step = dflow.jit(lambda: optimizer.apply([w.read()]))
    path = dflow.export({"step": (step,)}).save(tmp_path / "made")
    step()
    dflow.restore(path / "variables", [w, optimizer])
    same(w.read(), jnp.ones(3))
    there = dflow.load(path, prefix="loaded/")
    there.step()
    dflow.save(tmp_path / "after", there.variables, names=lambda name: name.removeprefix("loaded/"))
    dflow.restore(tmp_path / "after", [w, optimizer])
    same(dflow.read(there.variables), {"w": w.read(), "sgd/0/trace/w": optimizer.slots[0].trace[0].read()})


def test_what_is_loaded_runs_in_loops_and_eagerly_and_is_not_mapped(tmp_path: Path) -> None:
    total = dflow.Variable(jnp.zeros(3), name="total")

    def step(x: Any) -> Any:
        total.assign_add(x.sum(0))
        return total.read()

    there = loaded(dflow.export(step, BATCH), tmp_path)
    ones = jnp.ones((2, 3))
    looped = dflow.jit(lambda: jax.lax.scan(lambda _, __: (0, there.step(ones)), 0, None, length=3)[1])()
    np.testing.assert_array_equal(looped[:, 0], [2, 4, 6])
    with dflow.eager():
        np.testing.assert_array_equal(there.step(ones), [8, 8, 8])
    with pytest.raises(NotImplementedError, match="call_exported") as refused:
        jax.vmap(there.step)(jnp.ones((4, 2, 3)))
    assert re.search(r"at .*test_export\.py:\d+\n(?s:.*)jax\.vmap does not map it\. Export", refused.value.__notes__[0])
    np.testing.assert_array_equal(there.variables["total"], [8, 8, 8])


def test_past_its_order_of_derivatives_a_loaded_function_says_which_it_needs(tmp_path: Path) -> None:
    for order, derived, often in ((0, jax.grad, "once"), (1, lambda f: jax.grad(jax.grad(f)), "more often")):
        made = dflow.export(lambda x: x**3, dflow.spec("", jnp.float32), vjp_order=order).save(tmp_path / f"{order}")
        there = dflow.load(made)
        wanted = rf"with vjp_order={order}, and is differentiated {often}\n  at .*:\d+\n  .* vjp_order={order + 1}"
        with pytest.raises(dflow.ExportError, match=wanted):
            derived(there.__call__)(2.0)
    assert jax.grad(there.__call__)(2.0) == 12.0


def test_a_listing_says_all_that_a_caller_needs() -> None:
    w, steps = dflow.Variable(jnp.ones((3, 4)), name="w"), dflow.Variable(0, name="steps", trainable=False)

    @functools.partial(dflow.jit, static_argnames="mode")
    def train(x: Any, y: Any = None, mode: str = "sum") -> Any:
        steps.assign_add(1)
        return {"loss": (x @ w).sum(), "size": x.shape[0]}

    exported = dflow.export(
        {"serve": (lambda x: x @ w, BATCH), "train": dflow.export(train, BATCH, mode="mean", vjp_order=2)},
        platforms=("cpu", "tpu"),
    )
    head, _, rest = str(exported).partition("\n\n")
    assert head == f"exported by dflow {dflow.__version__} with JAX {jax.__version__}"
    assert (
        rest
        == """\
serve(x: f32[b,3]) -> f32[b,4]
  reads: w
  for cpu and tpu

train(x: f32[b,3]) -> {'loss': f32[], 'size': i32[]}
  reads: w
  writes: steps
  fixed: mode = 'mean'
  for cpu, cuda and tpu; derivatives up to order 2

variables
  w: f32[3,4]
  steps: i32[]"""
    )


def test_what_is_loaded_lists_itself_alike_and_has_its_functions_as_attributes(tmp_path: Path) -> None:
    w = dflow.Variable(jnp.ones(3), name="w", trainable=False)
    exported = dflow.export({"one": (lambda x: x * w, BATCH), "two": (w.read,)})
    there = loaded(exported, tmp_path)
    assert str(there) == str(exported)
    assert repr(exported) == "<Exported one, two>"
    assert repr(there) == "<Loaded one, two>"
    assert there["one"] is there.one
    assert {"one", "two", "variables"} <= set(dir(there))
    assert there.mlir_module("one") == exported.mlir_module("one")
    assert not there.variables["w"].trainable
    assert there.variables["w"].name == "loaded/w"
    with pytest.raises(AttributeError, match="what was loaded has no function 'three'; it has one, two"):
        _ = there.three


ROWS, FACTORS = jnp.ones((2, 3)), {"k": 1}

#: Arguments of a call, and the expected message.
WRONG_CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a shape": ((jnp.ones((2, 4)), 1.0, FACTORS), {}, "was exported for x: f32[b,3], and called with f32[2,4]"),
    "a dtype": ((jnp.ones((2, 3), int), 1.0, FACTORS), {}, "was exported for x: f32[b,3], and called with i32[2,3]"),
    "a fraction for an integer": ((ROWS, 1.0, {"k": 1.5}), {}, "for y['k']: i32[], and called with f32[]"),
    "a structure": (([ROWS], 1.0, FACTORS), {}, "x: expected f32[b,3], got a list of 1"),
    "another key": ((ROWS, 1.0, {"l": 1}), {}, "y: expected {'k': i32[]}, got a dict with the keys 'l'"),
    "too few": ((ROWS,), {}, "was called otherwise: missing a required argument: 's'"),
    "too many": ((ROWS, 1, FACTORS, 4), {}, "was called otherwise: too many positional arguments"),
    "another name": ((), {"z": 1}, "was called otherwise: missing a required argument: 'x'"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Call a loaded function with a batch, a number and a dict."""
    specs = (BATCH, jnp.float32(1), {"k": jnp.int32(1)})
    exported = dflow.export({"run": (lambda x, s, y: x * s + y["k"], *specs)})
    return loaded(exported, tmp_path_factory.mktemp("export"))


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_call_for_which_nothing_was_exported_says_what_was(case: str, run: Any) -> None:
    args, kwargs, message = WRONG_CALLS[case]
    with pytest.raises(TypeError) as caught:
        run(*args, **kwargs)
    assert message in str(caught.value)
    assert Path(__file__).name in str(caught.value)


def test_a_python_number_gets_the_type_that_was_exported(run: Any) -> None:
    same(run(ROWS, 2, {"k": 1}), ROWS * 2 + 1)


def test_sizes_that_do_not_go_together_are_told_by_the_parameters_names(tmp_path: Path) -> None:
    there = loaded(dflow.export(lambda x, y: x + y, BATCH, BATCH), tmp_path)
    with pytest.raises(TypeError, match=r"dimension size y.shape\[0\] \(= 5\) and the specification 'b' \(= 2\)"):
        there(BATCHES[0], BATCHES[1])


def test_an_export_for_other_platforms_says_so_where_it_is_called(tmp_path: Path) -> None:
    there = loaded(dflow.export(lambda x: x + 1, BATCH, platforms=("cuda", "tpu")), tmp_path)
    with pytest.raises(dflow.ExportError, match="call was exported for cuda and tpu, and this process runs on cpu"):
        there(BATCHES[0])
