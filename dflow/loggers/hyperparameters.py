"""Hyperparameters as loggers write them: numbers, texts and booleans by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflow.tracing.errors import TrainingError


def checked(name: str, given: Mapping[str, Any] | None) -> dict[str, str | bool | int | float]:
    """Return hyperparameters with other values as text, and a nested mapping as `outer/inner`.

    Raises TrainingError if they are no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TrainingError(
            f"{name}: hyperparameters: expected values by name, got {given!r}", 'give {"learning_rate": 0.1}'
        )
    found: dict[str, str | bool | int | float] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found.update({f"{key}/{inner}": plain for inner, plain in checked(name, value).items()})
        else:
            found[str(key)] = _plain(value)
    return found


def _plain(value: Any) -> str | bool | int | float:
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        value = np.asarray(value).item()
    return value if isinstance(value, str | bool | int | float) else str(value)
