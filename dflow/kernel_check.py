"""`dflow.check_kernel`: numerical comparison of each implementation of a kernel with its plain function.

An implementation runs on a device of its platform if there is one. Without one, an implementation of Pallas calls
runs on the CPU by Pallas' interpreter; any other is only traced, which compares its types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import jit as jax_jit
from jax.extend.core import jaxpr_as_fun

from dflow.tracing.errors import KernelError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import closed_parts, equations_within, is_jaxpr
from dflow.tracing.jaxprs.trace import argument_names
from dflow.tracing.kernels import Kernel
from dflow.tracing.primitives.kernel_choice import Implementation, floating
from dflow.tracing.source import at, caller

#: Default tolerance, relative and absolute, by the size in bytes of the dtype's real numbers.
_TOLERANCES = {1: 0.1, 2: 2e-2, 4: 1e-4, 8: 1e-8}


@dataclass(frozen=True)
class Checked:
    """Result for one implementation: how it ran, and its largest differences from the plain function.

    `how` is `run`, `interpreted`, or the reason why it was not run; then `values` and `gradients` are None. `gradients`
    is also None if the implementation uses the plain function's gradient.
    """

    platform: str
    label: str
    how: str
    values: float | None = None
    gradients: float | None = None

    def __str__(self) -> str:
        told = [f"{self.platform} {self.label}: {self.how}"]
        told += [f"values differ by {self.values:.2g}"] if self.values is not None else []
        told += [f"gradients differ by {self.gradients:.2g}"] if self.gradients is not None else []
        return ", ".join(told)


@dataclass(frozen=True)
class KernelCheck:
    """Result of `check_kernel`, ordered by platform; its `str` has a line for each implementation."""

    name: str
    types: str
    checked: tuple[Checked, ...]

    def __str__(self) -> str:
        return "\n".join([f"{self.name}({self.types})", *(f"  {line}" for line in self.checked)])


def check_kernel(
    kernel: Kernel[..., Any], /, *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> KernelCheck:
    """Compare each implementation of a kernel with the plain function, on these arguments.

    rtol, atol  allowed difference from the plain function's number: `atol + rtol * abs(number)`. Default for both:
                0.1 for 8-bit floats, 2e-2 for 16-bit, 1e-4 for f32, 1e-8 for f64. Integers must be equal
    raises      KernelError for other types or too large a difference, with the largest and its index; TypeError if
                `kernel` is not a kernel

    Compares values, and gradients for implementations with their own, for cotangents drawn from a fixed seed.
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(f"check_kernel takes a kernel, not {kernel!r}{at(caller())}\n  make it by @dflow.kernel")
    call, leaves = kernel.call_of(args, kwargs)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    results = [f"result{path}" for path in call.result_paths(leaves)]
    operands = argument_names(kernel.plain, args, kwargs, lambda parameter: parameter in kwargs)
    operands += [f"operand {position}" for position in range(len(operands), len(leaves))]
    plain, backward = call.choice, call.choice.backward()
    checked = []
    for platform, made in sorted(plain.by_platform.items()):
        how, call_by = _way_to_run(platform, made, leaves)
        if call_by is None:
            checked.append(Checked(platform, made.label, how))
            continue
        compared = partial(_compared, kernel.name, platform, made, rtol, atol)
        values = compared(results, call_by(made, *leaves), call_by(plain.plain, *leaves))
        gradients = None
        if (own := backward.by_platform.get(platform)) is not None:
            moved = [f"gradient by {operands[position]}" for position in floating(leaves)]
            given = [*leaves, *_cotangents(call.choice.types([jax.typeof(leaf) for leaf in leaves]))]
            gradients = compared(moved, call_by(own, *given), call_by(backward.plain, *given))
        checked.append(Checked(platform, made.label, how, values, gradients))
    return KernelCheck(kernel.name, ", ".join(str(array_type_of(leaf)) for leaf in leaves), tuple(checked))


def _way_to_run(
    platform: str, made: Implementation, leaves: Sequence[Any]
) -> tuple[str, Callable[..., Sequence[Any]] | None]:
    """Return how the implementation can be run here, and a function that so calls a function on operands.

    If it cannot be run, return the reason, and None.
    """
    with suppress(RuntimeError):
        device = jax.local_devices(backend=platform)[0]
        return "run", lambda fn, *operands: jax_jit(fn)(*jax.device_put(list(operands), device))
    try:
        closed = jax.make_jaxpr(made)(*(array_type_of(leaf).struct for leaf in leaves))
    except KernelError:
        raise
    except Exception as error:  # such as an import of a library for that platform only
        return f"no {platform} device here, and not traced, for {type(error).__name__}: {error}", None
    if not any(equation.primitive.name == "pallas_call" for equation in equations_within(closed_parts(closed)[0])):
        return f"no {platform} device here, types agree", None
    return "interpreted", lambda fn, *operands: jax_jit(_interpreted(fn, operands))(*operands)


def _compared(
    kernel: str,
    platform: str,
    made: Implementation,
    rtol: float | None,
    atol: float | None,
    names: Sequence[str],
    got: Sequence[Any],
    wanted: Sequence[Any],
) -> float:
    """Return the largest difference between results and those of the plain function.

    Raises KernelError, which names `made` and the result, if one is too large.
    """
    worst = 0.0
    for name, one, other in zip(names, map(_numbers, got), map(_numbers, wanted), strict=True):
        apart, allowed = _distances(one, other, rtol, atol)
        if not np.all(apart <= allowed):
            where = np.unravel_index(np.argmax(apart - allowed), apart.shape)
            index = f"[{', '.join(str(int(position)) for position in where)}]" if where else ""
            raise KernelError(
                f"kernel {kernel!r}: {name}{index} is {one[where]} by {made.label}, for {platform}, and "
                f"{other[where]} by the plain function",
                f"{int(np.sum(apart > allowed))} of {apart.size} numbers are too far apart, this by {apart[where]:.3g} "
                f"where {allowed[where]:.2g} is allowed"
                "\n  correct the implementation, or allow more with rtol= and atol=",
                at=made.loc,
            )
        worst = max(worst, float(apart.max(initial=0.0)))
    return worst


def _distances(got: Any, wanted: Any, rtol: float | None, atol: float | None) -> tuple[Any, Any]:
    """Return the differences of two arrays, and how large each may be."""
    rtol, atol = (_usual(wanted.dtype) if given is None else given for given in (rtol, atol))
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        rtol = atol = 0.0
    wide, expected = _wide(got), _wide(wanted)
    same = (got == wanted) | (np.isnan(wide) & np.isnan(expected))
    with np.errstate(invalid="ignore"):  # inf - inf, which is handled below
        apart = np.where(same, 0.0, np.abs(wide - expected))
    apart = np.where(np.isnan(apart), np.inf, apart)
    allowed = atol + rtol * np.where(np.isfinite(expected), np.abs(expected), 0.0)
    # float64 cannot hold all 64-bit integers: values that differ but convert to equal floats must not pass.
    apart = np.where(~same & (apart == 0.0), np.finfo(np.float64).tiny, apart)
    return apart, allowed


def _numbers(value: Any) -> Any:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _usual(dtype: Any) -> float:
    return _TOLERANCES[dtype.itemsize // (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)]


def _wide(values: Any) -> Any:
    is_complex = jnp.issubdtype(values.dtype, jnp.complexfloating)
    return values.astype(np.complex128 if is_complex else np.float64)


def _cotangents(types: Sequence[Any]) -> list[jax.Array]:
    """Return random cotangents, from a fixed seed, for the floating results."""
    wanted = [type for type in types if jnp.issubdtype(type.dtype, jnp.inexact)]
    keys = jax.random.split(jax.random.key(0), len(wanted))
    return [jax.random.normal(key, type.shape, type.dtype) for key, type in zip(keys, wanted, strict=True)]


def _interpreted(fn: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any]:
    """Return the function with its Pallas calls run by Pallas' interpreter."""
    run: Callable[..., Any] = jaxpr_as_fun(_with_interpreter(jax.make_jaxpr(fn)(*operands)))
    return run


def _with_interpreter(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_with_interpreter, value))
    if not is_jaxpr(value):
        return value
    jaxpr, _ = closed_parts(value)
    if jaxpr is not value:
        return value.replace(jaxpr=_with_interpreter(jaxpr))
    return jaxpr.replace(eqns=[_equation_with_interpreter(equation) for equation in jaxpr.eqns])


def _equation_with_interpreter(equation: Any) -> Any:
    if equation.primitive.name == "pallas_call":
        return equation.replace(params={**equation.params, "interpret": True})
    return equation.replace(params={key: _with_interpreter(value) for key, value in equation.params.items()})
