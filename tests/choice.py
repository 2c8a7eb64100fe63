"""Draw one of several things with no strategy made for it: Hypothesis takes longer to check a new one than to draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


def choice(draw: st.DrawFn, options: Sequence[T]) -> T:
    """Draw as from `st.sampled_from(options)`. Hypothesis keeps the few strategies of integers."""
    return options[draw(st.integers(0, len(options) - 1))]
