"""The names of the variables that values and gradients belong to, for messages; kept while the value exists.

Values of variables are noted as they are read in a trace, and gradients as `grad` and others return them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dflow.tracing.weak_by_identity import WeakDict

_values: WeakDict[Any, str] = WeakDict()
_gradients: WeakDict[Any, str] = WeakDict()


def note_value(value: Any, variable: str) -> None:
    """Remember that `value` is a value of `variable`."""
    with suppress(TypeError):  # a value without weak references
        _values[value] = variable


def note_gradient(gradient: Any, variable: str) -> None:
    """Remember that `gradient` is a gradient with respect to `variable`."""
    with suppress(TypeError):
        _gradients[gradient] = variable


def variable_read(value: Any) -> str | None:
    """The name of the variable that this value was read from; None for another value, and for one computed of it."""
    return _values.get(value)


def variable_differentiated(gradient: Any) -> str | None:
    """The name of the variable that this is a gradient of; None for other values, also computed from a gradient."""
    return _gradients.get(gradient)
