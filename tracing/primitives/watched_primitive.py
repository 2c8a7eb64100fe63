"""Primitives that refuse traces of JAX which would share them, repeat them or take them out of their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core as jex

#: The traces that a refusal is asked about, by the name of their class in JAX: vmap's, and that of partial evaluation.
BATCHED, LOOPED = "BatchTrace", "JaxprTrace"


class WatchedPrimitive(jex.Primitive):
    """A primitive that sees every trace it is bound in, also when no operand is traced.

    `refuse` is given the trace, one of the names above, and the parameters; it raises where the trace may not be.
    """

    def __init__(self, name: str, refuse: Callable[[str, Mapping[str, Any]], None]) -> None:
        super().__init__(name)
        self._refuse = refuse

    def bind_with_trace(self, trace: Any, *rest: Any) -> Any:
        kind = type(trace).__name__
        if kind in (BATCHED, LOOPED):
            self._refuse(kind, next(part for part in reversed(rest) if isinstance(part, dict)))
        return super().bind_with_trace(trace, *rest)  # type: ignore[no-untyped-call]
