"""Who takes the gradients that a step gives its optimizer: the optimizer itself, or the strategy that runs the step.

A strategy is part of what a function is traced under: the same function, called under none or under another, is traced
anew, with nothing changed in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from jax.experimental.xla_metadata import set_xla_metadata

#: The key under which an applier travels in JAX's trace context.
_KEY = "dflow_applier"


class GivenOptimizer(Protocol):
    """What is known of an optimizer."""

    name: str

    @property
    def variables(self) -> Any:
        """What it updates."""
        ...

    def apply_mean(self, gradients: Any) -> None:
        """Update the variables by the mean of gradients that an applier was given."""
        ...


class Applier(Protocol):
    """Takes the gradients of the steps traced under it; `name` tells it from all others."""

    name: str

    def apply(self, optimizer: GivenOptimizer, gradients: Any) -> None:
        """Take the gradients that an optimizer was given, which fit its variables."""
        ...


_current: ContextVar[Applier | None] = ContextVar("dflow_applier", default=None)


def current_applier() -> Applier | None:
    """Who takes the gradients here; None where the optimizer applies them."""
    return _current.get()


@contextmanager
def applying(applier: Applier) -> Iterator[None]:
    """Let `applier` take the gradients of what is traced inside."""
    token = _current.set(applier)
    try:
        with set_xla_metadata(**{_KEY: applier.name}):
            yield
    finally:
        _current.reset(token)
