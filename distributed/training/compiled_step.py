"""The step of a strategy that needs it as one program: a Python function is compiled, as `dflow.jit` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: `dflow.jit`, of the layer above, which sets it.
_compilers: list[Callable[..., Any]] = []


def compile_steps_by(jit: Callable[..., Any]) -> None:
    """Have `compiled` use this function."""
    _compilers[:] = [jit]


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step if it is compiled or loaded from an export, else a compiled function of it."""
    return step if hasattr(step, "trace") or hasattr(step, "signatures") else _compilers[0](step)
