"""One function with several implementations; the platform that a node is lowered for chooses one.

A `Choice` is a plain function over flat arrays and other functions for some platforms. `kernel_p` is one call of it:
one equation in a jaxpr, one node in a graph, until it is lowered. A call has the plain function's types, and its
derivatives and batched forms unless an implementation brings its own. These forms are choices too, and are resolved at
lowering as well.

A choice is called through `call`, which sets its derivatives; the equation itself is never differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit as jax_jit
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend import core as jex
from jax.interpreters import batching, mlir

from dflow.tracing.errors import KernelError
from dflow.tracing.jax_frontend import lower_by_platform, make_jaxpr, touches_state, trace_context
from dflow.tracing.source import Loc

#: From flat arrays to flat arrays.
Flat = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute a choice.

    `own_derivative`  it has its own derivative; otherwise the plain function's is used
    `own_batching`    under `vmap` it is batched itself; otherwise the plain function runs there
    """

    fn: Callable[..., Any]
    label: str
    loc: Loc | None
    own_derivative: bool = False
    own_batching: bool = True

    def __call__(self, *leaves: Any) -> list[Any]:
        return list(self.fn(*leaves))


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """A plain function of `arity` arrays, and its replacements by platform (`cpu`, `cuda`, `rocm`, `tpu`)."""

    name: str
    plain: Implementation
    by_platform: Mapping[str, Implementation]
    arity: int
    _types: dict[Any, Any] = field(default_factory=dict)
    _batched: dict[Any, Choice] = field(default_factory=dict)

    def labels(self) -> dict[str, str]:
        """The functions by platform, as a graph shows them."""
        named = {platform: made.label for platform, made in sorted(self.by_platform.items())}
        return {**named, "default": self.plain.label}

    def types(self, avals: Sequence[Any]) -> list[Any]:
        """The types of the results for operands of these types. Raises KernelError for a function that is not pure."""
        key = tuple(avals), trace_context()
        if key not in self._types:
            jaxpr, consts, _ = make_jaxpr(self.plain, *avals)
            self._refuse_impure(jaxpr, consts)
            self._types[key] = [var.aval for var in jaxpr.outvars]
        found: list[Any] = self._types[key]
        return found

    def _refuse_impure(self, jaxpr: Any, consts: Sequence[Any]) -> None:
        if touches_state(jaxpr.effects):
            raise KernelError(
                f"kernel {self.name!r} uses variables or queues, and its implementations know nothing of these",
                "give it their values as arguments",
                at=self.plain.loc,
            )
        if any(isinstance(const, jax.core.Tracer) for const in consts):
            raise KernelError(
                f"kernel {self.name!r} closes over a value of the function that is traced",
                "give it the value as an argument",
                at=self.plain.loc,
            )

    def __call__(self, *leaves: Any) -> list[Any]:
        """Apply it in the trace that runs now, with its derivatives."""
        return list(self._call(*leaves))

    @cached_property
    def _call(self) -> Flat:
        if any(made.own_derivative for made in self.by_platform.values()):
            return self._with_vjp()
        return self._with_jvp()

    @cached_property
    def _bound(self) -> Flat:
        def bound(*leaves: Any) -> list[Any]:
            return list(kernel_p.bind(*leaves, name=self.name, platforms=self))

        bound.__name__ = self.name  # which jaxprs and profiles show
        return bound

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{platform}: {label}" for platform, label in self.labels().items()) + "}"

    def _with_jvp(self) -> Flat:
        """The kernel as a `jax.custom_jvp` function, whose rule differentiates the plain function."""
        call = jax.custom_jvp(self._bound)

        def rule(primals: Any, tangents: Any) -> Any:
            results = call(*primals)
            live = [position for position, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
            if not live:
                return results, [zero_from_primal(result) for result in results]
            given, along = ([values[position] for position in live] for values in (primals, tangents))
            return results, jax.jvp(_of(self.plain, live, primals), given, along)[1]

        call.defjvp(rule, symbolic_zeros=True)
        return call

    def _with_vjp(self) -> Flat:
        """The function whose backward pass uses each implementation's own derivative where it has one.

        Implementations have different residuals, so only the operands are kept. The backward pass repeats the forward
        pass, and the compiler merges the two if they are in one program.
        """
        call = jax.custom_vjp(self._bound)
        forward, backward = self._forward(), self.backward()

        def run_forward(*leaves: Any) -> Any:
            return forward(*leaves), leaves

        def run_backward(leaves: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            live = floating(leaves)
            given = [cotangents[position] for position in floating(cotangents)]
            found = dict(zip(live, backward(*leaves, *given), strict=True)) if live and given else {}
            return tuple(found.get(position) for position in range(len(leaves)))

        call.defvjp(run_forward, run_backward)
        return call

    def _forward(self) -> Choice:
        """The choice that runs where the result will be differentiated."""

        def changed(made: Implementation) -> Implementation:
            return replace(made, fn=partial(_value, made), label=f"forward({made.label})", own_derivative=False)

        by_platform = {
            platform: changed(made) if made.own_derivative else made for platform, made in self.by_platform.items()
        }
        return Choice(self.name, changed(self.plain), by_platform, self.arity)

    def backward(self) -> Choice:
        """The backward pass: operands and cotangents of floating results to cotangents of floating operands."""

        def changed(made: Implementation) -> Implementation:
            fn = partial(_pulled, made, self.arity)
            return replace(made, fn=fn, label=f"backward({made.label})", own_derivative=False)

        own = {platform: changed(made) for platform, made in self.by_platform.items() if made.own_derivative}
        return Choice(self.name, changed(self.plain), own, self.arity)

    def batched(self, dims: Sequence[int | None]) -> Choice:
        """The choice under `vmap`: `dims` are the batch dimensions of the operands; results have theirs first."""
        key = tuple(dims)
        if key not in self._batched:

            def changed(made: Implementation) -> Implementation:
                return replace(made, fn=jax.vmap(made, in_axes=key), label=f"vmap({made.label})")

            own = {platform: changed(made) for platform, made in self.by_platform.items() if made.own_batching}
            self._batched[key] = Choice(self.name, changed(self.plain), own, self.arity)
        return self._batched[key]

    @cached_property
    def compiled(self) -> Flat:
        """The kernel as a function that JAX compiles for the devices of its operands."""
        return jax_jit(self._bound)


def _of(made: Flat, live: Sequence[int], leaves: Sequence[Any]) -> Flat:
    """The function of only the leaves numbered `live`; the other leaves are fixed."""

    def moved(*given: Any) -> list[Any]:
        by_position = dict(zip(live, given, strict=True))
        return list(made(*(by_position.get(position, leaf) for position, leaf in enumerate(leaves))))

    return moved


def _value(made: Implementation, *leaves: Any) -> list[Any]:
    """The result, computed as `_pulled` computes it, so that the compiler can merge the two."""
    live = floating(leaves)
    return list(jax.vjp(_of(made, live, leaves), *(leaves[position] for position in live))[0])


def _pulled(made: Implementation, arity: int, *operands: Any) -> list[Any]:
    leaves, cotangents = operands[:arity], operands[arity:]
    live = floating(leaves)

    def floating_results(*given: Any) -> list[Any]:
        results = _of(made, live, leaves)(*given)
        return [results[position] for position in floating(results)]

    return list(jax.vjp(floating_results, *(leaves[position] for position in live))[1](list(cotangents)))


def floating(values: Sequence[Any]) -> list[int]:
    """Indices of the values that can have a derivative."""
    return [position for position, value in enumerate(values) if jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)]


#: One call of a choice.
kernel_p: Any = jex.Primitive("kernel")
kernel_p.multiple_results = True


def _run(*operands: Any, name: str, platforms: Choice) -> Sequence[Any]:
    # Also under `jax.disable_jit` the choice is made by lowering: only lowering knows the platform's name.
    with jax.disable_jit(False):
        return platforms.compiled(*operands)


def _lower(ctx: Any, *operands: Any, name: str, platforms: Choice) -> Any:
    return lower_by_platform(ctx, platforms.by_platform, platforms.plain, operands)


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, name: str, platforms: Choice) -> Any:
    results = kernel_p.bind(*operands, name=name, platforms=platforms.batched(dims))
    return results, [0] * len(results)


kernel_p.def_impl(_run)
kernel_p.def_abstract_eval(lambda *avals, name, platforms: platforms.types(avals))
batching.primitive_batchers[kernel_p] = _batch
mlir.register_lowering(kernel_p, _lower)


def is_kernel(jaxpr: Any) -> bool:
    """Whether a jaxpr is one call of a kernel, and nothing else."""
    return len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive is kernel_p
