"""`dflow.kernel`: the chosen implementations, its node in a graph, derivatives, batches, and refused uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import dflow
from dflow.tracing.errors import KernelError
from tests.effort import examples

LOWERED = {"cpu": "tanh", "cuda": "sine", "rocm": "sine", "tpu": "cosine"}


def made(**options: Any) -> dflow.Kernel[..., Any]:
    """A kernel that computes tanh, on GPUs sin and on TPUs cos, so that its lowering shows which was chosen."""

    @dflow.kernel
    def wave(x: Any, *, scale: float = 1.0) -> Any:
        return jnp.tanh(scale * x)

    @dflow.kernel(wave, platform="gpu", **options)
    def wave_on_gpu(x: Any, *, scale: float = 1.0) -> Any:
        return jnp.sin(scale * x)

    @dflow.kernel(wave, platform="tpu", **options)
    def wave_on_tpu(x: Any, *, scale: float = 1.0) -> Any:
        return jnp.cos(scale * x)

    return wave


def lowered(fn: Callable[..., Any], platforms: tuple[str, ...], *args: Any) -> str:
    """The StableHLO of a function for platforms that this machine may lack."""
    text: str = dflow.jit(fn).trace(*args).lower(lowering_platforms=platforms).as_text()
    return text


def waves(text: str) -> set[str]:
    return {name for name in ("tanh", "sine", "cosine") if f"stablehlo.{name}" in text}


x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


@pytest.mark.parametrize("platform", sorted(LOWERED))
def test_each_platform_takes_its_own_implementation(platform: str) -> None:
    assert waves(lowered(made(), (platform,), x)) == {LOWERED[platform]}


@pytest.mark.parametrize(
    "fn",
    [
        lambda wave: wave,
        jax.vmap,
        lambda wave: lambda x: jax.lax.scan(lambda c, r: (c + wave(r), None), x[0], x)[0],
        lambda wave: lambda x: jax.lax.cond(x[0, 0] > 0, wave, lambda x: x, x),
        jax.checkpoint,
        dflow.jit,
        lambda wave: lambda x: jax.lax.map(wave, x),
    ],
    ids=["called", "vmap", "scan", "cond", "checkpoint", "jit", "map"],
)
def test_the_choice_is_made_inside_whatever_jax_traces_around_it(fn: Any) -> None:
    wave = made()
    for platform, name in LOWERED.items():
        assert waves(lowered(fn(wave), (platform,), x)) == {name}
    np.testing.assert_allclose(dflow.jit(fn(wave))(x), fn(wave.plain)(x), rtol=1e-6)


def test_a_program_for_several_platforms_holds_each_implementation_once_and_runs_the_one_of_this() -> None:
    exported = export.export(jax.jit(made()), platforms=("cpu", "cuda", "rocm", "tpu"))(x)
    assert waves(exported.mlir_module()) == {"tanh", "sine", "cosine"}
    np.testing.assert_array_equal(export.deserialize(exported.serialize()).call(x), jnp.tanh(x))


def test_a_step_with_state_is_exported_with_each_implementation(tmp_path: Path) -> None:
    wave, w = made(derivative="own"), dflow.Variable(jnp.ones(3), name="w")

    @dflow.jit
    def step(x: Any) -> Any:
        [gradient] = dflow.grad(lambda: wave(x * w).sum(), [w])()
        w.assign_sub(gradient)
        return jax.vmap(wave)(x * w)

    exported = dflow.export(step, dflow.spec("b, 3", jnp.float32), platforms=("cpu", "cuda", "tpu"))
    exported.save(tmp_path / "step")
    loaded = dflow.load(tmp_path / "step")
    assert waves(loaded.mlir_module()) == {"tanh", "sine", "cosine"}
    assert waves(exported.mlir_module(platform="tpu")) == {"sine", "cosine"}
    np.testing.assert_allclose(loaded.step(x), step(x), rtol=1e-6)


@pytest.mark.parametrize("derivative", ["own", "plain"])
def test_in_a_shard_map_its_results_and_gradients_keep_their_axes(derivative: str) -> None:
    kernel = dflow.kernel(lambda x, b: jnp.tanh(x) + b)
    dflow.kernel(kernel, platform="cpu", derivative=derivative)(lambda x, b: b + jnp.tanh(x))  # type: ignore[call-overload]
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(kernel, mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec("i"))
    by_b = jax.grad(lambda b: dflow.jit(mapped)(x, b).sum())
    np.testing.assert_allclose(mapped(x, jnp.ones(3)), jnp.tanh(x) + 1, rtol=1e-6)
    np.testing.assert_allclose(by_b(jnp.ones(3)), [2.0] * 3, rtol=1e-6)


def test_a_graph_has_one_node_that_names_what_runs_where() -> None:
    wave = made()
    view = dflow.graph(lambda x: wave(x * 2.0) + 1.0, x)
    [line] = [line for line in str(view).splitlines() if "jax.kernel(" in line]
    assert line.split("  # ")[0] == (
        '  %2: f32[2,3] = jax.kernel(%1) {name="wave", platforms={"cuda": <wave_on_gpu>, "rocm": <wave_on_gpu>, '
        '"tpu": <wave_on_tpu>, "default": <wave>}}'
    )
    assert "test_kernels.py" in line
    assert str(dflow.GraphView.parse(str(view))) == str(view)
    assert "kernel wave" in view.svg()
    np.testing.assert_allclose(view.run("2"), jnp.tanh(x * 2.0), rtol=1e-6)


def test_a_graph_shows_what_is_batched_and_differentiated() -> None:
    wave = made(derivative="own")
    view = str(dflow.graph(jax.vmap(jax.grad(lambda x: wave(x).sum() ** 2)), x))
    assert '"cuda": <vmap(forward(wave_on_gpu))>' in view
    assert '"default": <vmap(backward(wave))>' in view


def test_a_variable_is_given_by_its_value_and_state_around_a_kernel_is_kept() -> None:
    wave = made()
    w = dflow.Variable(x, name="w")

    @dflow.jit
    def step() -> Any:
        def loss() -> Any:
            return wave(w, scale=2.0).sum()

        value, [gradient] = dflow.value_and_grad(loss, [w])()
        w.assign_sub(gradient)
        return value

    assert step() == pytest.approx(0.0, abs=1e-6)
    np.testing.assert_allclose(w.read(), x - 2.0 / jnp.cosh(2.0 * x) ** 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(wave(w), jnp.tanh(w.read()), rtol=1e-6)


def test_it_runs_in_an_eager_run_and_where_jax_does_not_compile() -> None:
    wave = made()
    with dflow.eager():
        np.testing.assert_array_equal(dflow.jit(wave)(x), jnp.tanh(x))
    with jax.disable_jit():
        np.testing.assert_array_equal(wave(x), jnp.tanh(x))


def test_trees_of_arrays_and_static_values_go_in_and_trees_come_out() -> None:
    @dflow.kernel
    def halves(pair: Any, *, mask: Any = None, how: str = "sum", sizes: tuple[int, ...] = ()) -> Any:
        kept = pair["a"] if mask is None else jnp.where(mask, pair["a"], 0)
        return {"how": getattr(kept, how)(), "b": (pair["b"], len(sizes))}

    @dflow.kernel(halves, platform="cuda")
    def halves_on_cuda(pair: Any, *, mask: Any = None, how: str = "sum", sizes: tuple[int, ...] = ()) -> Any:
        return halves.plain(pair, mask=mask, how=how, sizes=sizes)

    given = {"a": x, "b": jnp.arange(2)}
    found = halves(given, mask=x > 0, how="max", sizes=(1, 2))
    assert (float(found["how"]), found["b"][0].tolist(), int(found["b"][1])) == (1.0, [0, 1], 2)
    assert float(halves(given)["how"]) == pytest.approx(0.0, abs=1e-6)
    assert "stablehlo" in lowered(partial(halves, how="min"), ("cuda",), given)


def exponential(differentiable: str) -> Any:
    """exp, with JAX's derivative or with a rule that gives twice the derivative, which shows that the rule was used."""
    if differentiable == "by its ops":
        return jnp.exp
    if differentiable == "by custom_jvp":
        fn = jax.custom_jvp(jnp.exp)
        fn.defjvp(lambda primals, tangents: (jnp.exp(primals[0]), 2 * jnp.exp(primals[0]) * tangents[0]))
        return fn
    fn = jax.custom_vjp(jnp.exp)
    fn.defvjp(lambda x: (jnp.exp(x), jnp.exp(x)), lambda kept, cotangent: (2 * kept * cotangent,))
    return fn


@pytest.mark.parametrize("differentiable", ["by its ops", "by custom_jvp", "by custom_vjp"])
@pytest.mark.parametrize("has_other", [False, True])
def test_the_derivative_is_the_plain_functions(differentiable: str, has_other: bool) -> None:
    plain = exponential(differentiable)
    kernel = dflow.kernel(plain)
    if has_other:  # which supports only reverse mode, on this platform too
        dflow.kernel(kernel, platform="tpu", derivative="own")(jnp.cosh)
    for fn in (lambda f: jax.grad(lambda x: f(x).sum()), lambda f: jax.vmap(jax.vmap(jax.grad(f)))):
        np.testing.assert_allclose(fn(kernel)(x), fn(plain)(x), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(fn(kernel))(x), fn(plain)(x), rtol=1e-6)
    if differentiable != "by custom_vjp" and not has_other:
        for found, wanted in zip(jax.jvp(kernel, [x], [x]), jax.jvp(plain, [x], [x]), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(jax.grad(kernel))(0.3), jax.grad(jax.grad(plain))(0.3), rtol=1e-6)


def test_an_implementations_own_derivative_runs_where_it_runs() -> None:
    wave = made(derivative="own")

    def gradient(x: Any) -> Any:
        return jax.grad(lambda x: wave(x).sum())(x)

    for platform, name in LOWERED.items():
        assert waves(lowered(gradient, (platform,), x)) == ({"tanh"} if name == "tanh" else {"sine", "cosine"})
    np.testing.assert_allclose(gradient(x), jax.grad(lambda x: jnp.tanh(x).sum())(x), rtol=1e-6)
    looped = lowered(lambda x: jax.lax.scan(lambda c, r: (c + gradient(r), None), x[0], x)[0], ("cuda",), x)
    assert waves(looped) == {"sine", "cosine"}


def test_without_one_of_its_own_the_plain_derivative_runs_everywhere() -> None:
    wave = made()
    for platform in LOWERED:
        assert waves(lowered(jax.grad(lambda x: wave(x).sum()), (platform,), x)) == {"tanh"}


def test_what_custom_vjp_made_keeps_its_rule_and_says_that_there_is_no_forward_mode() -> None:
    kernel = dflow.kernel(jnp.exp)
    dflow.kernel(kernel, platform="cpu")(exponential("by custom_vjp"))
    np.testing.assert_allclose(jax.grad(kernel)(1.0), 2 * jnp.exp(1.0), rtol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(kernel, [1.0], [1.0])
    plain = dflow.kernel(jnp.exp)
    dflow.kernel(plain, platform="cpu", derivative="plain")(exponential("by custom_vjp"))
    np.testing.assert_allclose(jax.grad(plain)(1.0), jnp.exp(1.0), rtol=1e-6)


@pytest.mark.parametrize("own", [False, True])
def test_integers_have_no_derivative_and_unused_operands_a_zero_one(own: bool) -> None:
    @dflow.kernel
    def pick(table: Any, other: Any, rows: Any) -> Any:
        return table[rows] * 2.0, rows + 1

    @dflow.kernel(pick, platform="cpu", derivative="own" if own else "plain")
    def pick_on_cpu(table: Any, other: Any, rows: Any) -> Any:
        return jnp.take(table, rows, axis=0) * 2.0, rows + 1

    rows = jnp.array([1, 1, 0])
    by_table, by_other = jax.grad(lambda t, o: pick(t, o, rows)[0].sum(), (0, 1))(x, x)
    np.testing.assert_array_equal(by_table, [[2.0] * 3, [4.0] * 3])
    np.testing.assert_array_equal(by_other, jnp.zeros_like(x))
    assert pick(x, x, rows)[1].tolist() == [2, 2, 1]
    np.testing.assert_array_equal(jax.grad(lambda y: (pick(x, x, rows)[0] * y).sum())(1.0), pick(x, x, rows)[0].sum())


def test_a_batch_takes_the_plain_function_where_it_is_told_to() -> None:
    wave = made(vmap="plain")
    for platform, name in LOWERED.items():
        assert waves(lowered(wave, (platform,), x)) == {name}
        assert waves(lowered(jax.vmap(wave), (platform,), x)) == {"tanh"}


@settings(max_examples=examples(9))
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_on_random_shapes_and_axes_it_is_the_plain_function(shape: list[int], data: st.DataObject) -> None:
    def reference(a: Any, b: Any) -> Any:
        return jnp.sin(a).sum() * b, a - b

    kernel = dflow.kernel(reference)
    dflow.kernel(kernel, platform="cpu", derivative=data.draw(st.sampled_from(["own", "plain"])))(
        lambda a, b: (jnp.cos(a - jnp.pi / 2).sum() * b, -(b - a))
    )
    a = jax.random.normal(jax.random.key(len(shape)), shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    dims = data.draw(st.sampled_from([(axis, None), (axis, 0), (None, 0)]))
    b = jnp.arange(float(shape[axis] if dims[1] == 0 and dims[0] is not None else 3))
    programs: dict[str, Callable[[Any], Any]] = {
        "called": lambda f: partial(f, a, 2.0),
        "mapped over the other": lambda f: lambda: jax.vmap(f, (None, 0))(a, b),
        "pulled back": lambda f: lambda: jax.vjp(f, a, 2.0)[1](f(a, 2.0)),
        "mapped": lambda f: lambda: jax.vmap(f, dims)(a, 2.0 if dims[1] is None else b),
        "mapped and differentiated": lambda f: (
            lambda: jax.grad(lambda a: jax.vmap(f, (axis, None))(a, 2.0)[0].sum())(a)
        ),
    }
    program = programs[data.draw(st.sampled_from(sorted(programs)))]
    wanted = jax.tree.leaves(jax.jit(program(reference))())
    for found in (program(kernel)(), dflow.jit(program(kernel))()):
        for left, right in zip(jax.tree.leaves(found), wanted, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "told"),
    [
        (
            lambda x: x[:1],
            r"gives f32\[2,3\] for \(f32\[2,3\]\), and its implementation for cpu, <lambda>, gives f32\[1,3\]",
        ),
        (lambda x: x.astype(jnp.int32), r"<lambda>, gives i32\[2,3\]"),
        (lambda x: (x, x), r"<lambda>, gives \(f32\[2,3\], f32\[2,3\]\)"),
    ],
)
def test_other_types_than_the_plain_functions_are_told_with_the_line(implementation: Any, told: str) -> None:
    kernel = dflow.kernel(jnp.tanh)
    dflow.kernel(kernel, platform="cpu")(implementation)
    for call in (kernel, jax.vmap(kernel), dflow.jit(kernel)):
        with pytest.raises(KernelError, match=r"kernel 'tanh' gives .*\n  at .*test_kernels.py:\d+\n  make it give"):
            call(x[None] if call is not kernel and not isinstance(call, dflow.Function) else x)
    with pytest.raises(KernelError, match=told):
        kernel(x)
    assert "tanh" in lowered(kernel, ("tpu",), x)


def test_what_an_implementation_raises_names_it() -> None:
    kernel = dflow.kernel(jnp.tanh)

    @dflow.kernel(kernel, platform="cpu")
    def broken(x: Any) -> Any:
        raise NotImplementedError("no such size")

    with pytest.raises(NotImplementedError, match="no such size") as caught:
        kernel(x)
    assert "in broken, the implementation of kernel 'tanh' for cpu" in caught.value.__notes__[0]
    assert 'register it with vmap="plain"' in caught.value.__notes__[0]


def test_what_cannot_be_registered_is_refused() -> None:
    wave = made()
    with pytest.raises(KernelError, match=r"for the platform 'gpus', which is none\n  at .*\n  the platforms are"):
        dflow.kernel(wave, platform="gpus")(jnp.sin)
    with pytest.raises(KernelError, match=r"for cuda already, wave_on_gpu, and is given another, sin\n  at .*\n  the"):
        dflow.kernel(wave, platform=["cpu", "cuda"])(jnp.sin)
    assert sorted(wave.implementations) == ["cuda", "rocm", "tpu"]
    wave(x)
    with pytest.raises(KernelError, match=r"given an implementation, sin, after it was called"):
        dflow.kernel(wave, platform="cpu")(jnp.sin)
    with pytest.raises(TypeError, match=r"tanh is no kernel yet\n  at .*\n  decorate it with @dflow.kernel first"):
        dflow.kernel(jnp.tanh, platform="cuda")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r'without a platform\n  at .*\n  say @dflow.kernel\(wave, platform="cuda"\)'):
        dflow.kernel(wave)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="derivative is 'own' or 'plain', not 'none'"):
        dflow.kernel(wave, platform="cpu", derivative="none")  # type: ignore[call-overload]


def test_what_cannot_be_given_is_refused() -> None:
    wave = made()
    with pytest.raises(KernelError, match=r"'wave' is given 'x' by position, which is no array\n  at .*\n  give"):
        wave("x")
    with pytest.raises(KernelError, match=r"given scale=\[1.0\], which is neither an array nor hashable\n  at .*"):
        wave(x, scale=[1.0])


def test_state_and_values_of_an_outer_trace_are_refused_inside() -> None:
    w = dflow.Variable(x, name="w")
    with pytest.raises(KernelError, match=r"'reads' uses variables or queues.*\n  at .*\n  give it their values"):
        dflow.kernel(named("reads", lambda y: w + y))(x)
    with pytest.raises(KernelError, match=r"'closes' closes over a value of the function that is traced\n  at .*"):
        jax.jit(lambda z: dflow.kernel(named("closes", lambda y: z + y))(x))(x)


def named(name: str, fn: Any) -> Any:
    fn.__name__ = name
    return fn


def test_it_tells_what_it_has() -> None:
    assert repr(made()) == "<dflow.kernel wave for any platform, cuda, rocm, tpu>"


def test_the_compiler_merges_the_two_forward_runs_of_a_value_and_its_gradient() -> None:
    step = dflow.jit(jax.value_and_grad(lambda x: made()(x).sum()))
    assert step.lower(x).compile().as_text().count(" tanh(") == 1
