"""Draw one of several options. Hypothesis takes longer to validate a new `sampled_from` than to draw from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


def choice(draw: st.DrawFn, options: Sequence[T]) -> T:
    """Draw like `st.sampled_from(options)`. Hypothesis caches the few strategies of integers that this uses."""
    return options[draw(st.integers(0, len(options) - 1))]
