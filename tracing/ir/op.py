"""Ops: each has a name, a typing rule, and effects.

An op of ours is declared with `@op` over its typing rule, an ordinary function from operand types (positional) and
attributes (keyword) to result types. A numeric op holds a JAX primitive and asks JAX for its types. The
implementations of an op are in tables of other layers, keyed by the op, so that this layer never meets XLA.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflow.tracing.errors import InternalError
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.types import Type

#: An effect and the index of the operand it is on; None for an effect that is on no operand.
Declared = tuple[Effect, int | None]


@dataclass(frozen=True, eq=False)
class OpDef:
    """An op.

    `rule`          gives the types of its results
    `declared`      its effects; those of an op with bodies are its bodies'
    `primitive`     is set on numeric ops
    `own_operands`  number of its first operands that it does not hand to its bodies
    `least_count`   the least `count` of an op that takes several elements or gradients; None for others
    """

    name: str
    rule: Callable[..., Any] | None
    declared: tuple[Declared, ...] = ()
    primitive: Any = None
    own_operands: int = 0
    least_count: int | None = None

    @property
    def method(self) -> str:
        """Its name without the kind of state that it is on: `enqueue` of `queue.enqueue`."""
        return self.name.partition(".")[2]

    @property
    def releases(self) -> bool:
        """Whether it makes this program's earlier writes known to other programs."""
        return any(effect is Effect.RELEASE for effect, _ in self.declared)

    @property
    def is_on_resource(self) -> bool:
        """Whether it is an op on a queue or an accumulator."""
        return any(effect in (Effect.RELEASE, Effect.ACQUIRE) for effect, _ in self.declared)

    def __repr__(self) -> str:
        return self.name


#: Every op of ours, by name.
OPS: dict[str, OpDef] = {}


class BodySignature(NamedTuple):
    """The types of a body's operands and results."""

    takes: tuple[Type, ...]
    gives: tuple[Type, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.takes))})"


def op(
    name: str, *effects: Declared, own_operands: int = 0, least_count: int | None = None
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op of ours over its typing rule. Raises InternalError when the name is taken.

    The rule of an op with bodies is given their signatures as `bodies`.
    """

    def declare(rule: Callable[..., Any]) -> OpDef:
        if name in OPS:
            raise InternalError(f"op {name!r} is declared twice")
        OPS[name] = OpDef(name, rule, effects, None, own_operands, least_count)
        return OPS[name]

    return declare


_NUMERIC: dict[tuple[Any, bool], OpDef] = {}


def numeric(primitive: Any, *, unknown_effects: bool = False) -> OpDef:
    """The op of a JAX primitive. With `unknown_effects` it is ordered with every other op that has an effect."""
    key = (primitive, unknown_effects)
    if key not in _NUMERIC:
        effects: tuple[Declared, ...] = ((Effect.UNKNOWN, None),) if unknown_effects else ()
        _NUMERIC[key] = OpDef(f"jax.{primitive.name}", None, effects, primitive)
    return _NUMERIC[key]
