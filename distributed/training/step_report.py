"""The numbers of a step that are shown as progress, and its losses that are not finite."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dflow.distributed.wire.messages.rounds import NotFinite


def first_not_finite(first: int, losses: Iterable[Mapping[str, Any]]) -> NotFinite | None:
    """Return the first loss that is not finite, of consecutive steps from number `first` on; None if all are finite.

    losses   for each step, scalars by name; only names that end with `loss` are checked
    """
    for step, named in enumerate(losses, first):
        for name, value in named.items():
            if name.endswith("loss") and not math.isfinite(number := float(value)):
                return NotFinite(step, name, number)
    return None


def losses_of(outcome: Any) -> dict[str, Any]:
    """Return the losses among a step's results, which may not be computed yet."""
    return {name: value for name, value in scalars(outcome) if name.endswith("loss")}


def real_scalars(outcome: Any) -> dict[str, float]:
    """Return the real scalars among a step's results, by name; a result that is one scalar is named `loss`."""
    return {name: float(value) for name, value in scalars(outcome)}


def scalars(outcome: Any) -> Iterator[tuple[str, Any]]:
    """Yield the real scalars among a step's results, which may not be computed yet, by name."""
    named = outcome if isinstance(outcome, Mapping) else {"loss": outcome}
    return ((str(name), value) for name, value in named.items() if _is_real_scalar(value))


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return getattr(value, "shape", None) == () and _is_real(getattr(value, "dtype", None))


@functools.cache  # the strategies ask for each step
def _is_real(dtype: Any) -> bool:
    # Every real dtype, even bfloat16 and 8-bit floats, casts to float64; complex ones do not, and random keys have no
    # NumPy dtype.
    return isinstance(dtype, np.dtype) and np.can_cast(dtype, np.float64, "same_kind")
