"""`dflow.check_kernel`: the implementations that it runs, its tolerances, and the message for larger differences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import dflow
from dflow.tracing.errors import KernelError

x = jnp.linspace(-1.0, 1.0, 16).reshape(8, 2)


def compared(plain: Callable[..., Any], other: Callable[..., Any], **options: Any) -> dflow.Kernel[..., Any]:
    """A kernel with an implementation for this platform."""
    kernel = dflow.kernel(plain)
    dflow.kernel(kernel, platform="cpu", **options)(other)
    return kernel


def doubled(x: Any) -> Any:
    return 2.0 * x


def doubled_by_adding(x: Any) -> Any:
    return x + x


def pallas_map(body: Callable[[Any], Any], x: Any) -> Any:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = body(x_ref[...])

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_it_tells_each_implementation_and_how_it_ran() -> None:
    kernel = compared(doubled, doubled_by_adding, derivative="own")
    dflow.kernel(kernel, platform="cuda")(doubled_by_adding)
    dflow.kernel(kernel, platform="tpu")(partial(pallas_map, doubled))
    checked = dflow.check_kernel(kernel, x)
    assert str(checked) == (
        "doubled(f32[8,2])\n"
        "  cpu doubled_by_adding: run, values differ by 0, gradients differ by 0\n"
        "  cuda doubled_by_adding: no cuda device here, types agree\n"
        "  tpu pallas_map: interpreted, values differ by 0"
    )
    assert [line.platform for line in checked.checked] == ["cpu", "cuda", "tpu"]


def test_what_cannot_be_traced_here_is_told_and_no_error() -> None:
    kernel = dflow.kernel(doubled)

    @dflow.kernel(kernel, platform="rocm")
    def by_a_library(x: Any) -> Any:
        raise ImportError("no module named rocm_kernels")

    assert "not traced, for ImportError: no module named rocm_kernels" in str(dflow.check_kernel(kernel, x))


def test_types_are_compared_where_nothing_is_run() -> None:
    kernel = dflow.kernel(doubled)
    dflow.kernel(kernel, platform="cuda")(lambda x: x[0])
    with pytest.raises(KernelError, match=r"gives f32\[8,2\] for .* implementation for cuda, <lambda>, gives f32\[2\]"):
        dflow.check_kernel(kernel, x)


@pytest.mark.parametrize("where", ["alone", "in a branch", "in a loop", "in a nested jit"])
def test_pallas_is_interpreted_wherever_it_stands(where: str) -> None:
    call = partial(pallas_map, doubled)
    around: dict[str, Callable[[Any], Any]] = {
        "alone": call,
        "in a branch": lambda x: jax.lax.cond(x[0, 0] < 0, call, lambda x: x, x),
        "in a loop": lambda x: jax.lax.map(call, x),
        "in a nested jit": lambda x: jax.jit(call)(jnp.take_along_axis(x, jnp.zeros((8, 1), int), 1) * 0 + x),
    }
    kernel = dflow.kernel(doubled)
    dflow.kernel(kernel, platform="tpu")(around[where])
    assert "interpreted, values differ by 0" in str(dflow.check_kernel(kernel, x))


def test_the_number_that_is_farthest_off_is_told_with_its_place() -> None:
    kernel = compared(lambda x: (x, {"y": 2.0 * x}), lambda x: (x, {"y": jnp.where(x > 0.9, x, 2.0 * x)}))
    told = (
        r"kernel '<lambda>': result\[1\]\['y'\]\[7, 1\] is 1.0 by <lambda>, for cpu, and 2.0 by the plain function\n"
        r"  at .*test_kernel_check.py:\d+\n"
        r"  1 of 16 numbers are too far apart, this by 1 where 0.0003 is allowed\n"
        r"  correct the implementation, or allow more with rtol= and atol="
    )
    with pytest.raises(KernelError, match=told):
        dflow.check_kernel(kernel, x)
    assert "values differ by 1" in str(dflow.check_kernel(kernel, x, atol=1.0))


def test_gradients_of_its_own_are_compared_by_argument() -> None:
    wrong = jax.custom_vjp(lambda weight, x: weight * x)
    wrong.defvjp(lambda weight, x: (weight * x, (weight, x)), lambda kept, g: (g * kept[1], g * kept[0] * 1.01))
    kernel = compared(lambda weight, x: weight * x, wrong)
    with pytest.raises(KernelError, match=r"gradient by x\[\d, \d\] is .* by backward\(<lambda>\)|gradient by x"):
        dflow.check_kernel(kernel, x, x)
    dflow.check_kernel(kernel, x, x, rtol=0.02)


@pytest.mark.parametrize(
    ("dtype", "factor", "is_near"),
    [
        ("float32", 1.00005, True),
        ("float32", 1.001, False),
        ("bfloat16", 1.01, True),
        ("float16", 1.05, False),
        ("complex64", 1.00005, True),
        ("complex64", 1.001, False),
    ],
)
def test_how_far_is_too_far_is_by_dtype(dtype: str, factor: float, is_near: bool) -> None:
    kernel = compared(lambda x: 100 * x, lambda x: (100 * x * factor).astype(x.dtype))
    given = jnp.ones(3, dtype)
    if is_near:
        dflow.check_kernel(kernel, given)
    else:
        with pytest.raises(KernelError, match="3 of 3 numbers are too far apart"):
            dflow.check_kernel(kernel, given)


def test_integers_are_to_be_equal_and_numbers_that_are_none_agree() -> None:
    with pytest.raises(KernelError, match=r"result\[2\] is 3 by .* and 2 by the plain function"):
        dflow.check_kernel(compared(lambda n: n, lambda n: jnp.where(n == 2, 3, n)), jnp.arange(4), atol=5.0)
    infinite = jnp.array([jnp.nan, jnp.inf, -jnp.inf])
    dflow.check_kernel(compared(doubled, doubled_by_adding), infinite)
    with pytest.raises(KernelError, match=r"result\[1\] is -inf by <lambda>, for cpu, and inf by"):
        dflow.check_kernel(compared(doubled, lambda x: jnp.where(x > 0, -x, x)), infinite)
    with pytest.raises(KernelError, match=r"result is nan by"):
        dflow.check_kernel(compared(doubled, lambda x: x * jnp.nan), jnp.float32(1.0))


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"check_kernel takes a kernel, not <function doubled.*\n  at .*\n  make it"):
        dflow.check_kernel(doubled, x)  # type: ignore[arg-type]


def test_integers_of_64_bits_that_floats_cannot_tell_apart_differ() -> None:
    @dflow.kernel
    def more(x: Any) -> Any:
        return x + 1

    @dflow.kernel(more, platform="cpu")
    def by_two(x: Any) -> Any:
        return x + 2

    with jax.enable_x64(True), pytest.raises(KernelError, match=r"1 of 1 numbers are too far apart"):
        dflow.check_kernel(more, jnp.asarray([2**60], jnp.int64))


def scaled_body(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = x_ref[...] * 2.0


# JAX 0.11 warns of the compiler that it chooses for GPUs.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.device
def test_every_implementation_of_a_kernel_agrees_with_the_plain_function() -> None:
    @dflow.kernel
    def scaled(x: Any) -> Any:
        return x * 2.0

    @dflow.kernel(scaled, platform=["cuda", "tpu"])
    def scaled_by_pallas(x: Any) -> Any:
        block = pl.BlockSpec((16, 128), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(scaled_body, shape, grid=(x.shape[0] // 16,), in_specs=[block], out_specs=block)(x)

    x = jnp.arange(32 * 128.0).reshape(32, 128)
    told = str(dflow.check_kernel(scaled, x))
    for platform in ("cuda", "tpu"):
        assert f"{platform} scaled_by_pallas: " in told
    w = dflow.Variable(x, name="w")
    step = dflow.jit(lambda: w.assign(scaled(w)))
    step()
    np.testing.assert_allclose(w.read(), x * 2.0)
    np.testing.assert_allclose(jax.grad(lambda x: scaled(x).sum())(x), np.full((32, 128), 2.0))
