"""The part of an array that has some of the indices along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class AxisSlice(NamedTuple):
    """The indices `start`, `start + step`, ..., `size` of them, along the dimension `axis`."""

    axis: int
    start: int
    size: int
    step: int = 1

    def of(self, array: Any, origin: Any = None) -> Any:
        """The part of an array that has all indices, moved by `origin` indices, an integer that may be traced."""
        if origin is not None:
            import jax.numpy as jnp  # not above, since messages have this class and the coordinator starts without JAX

            indices = origin + self.start + self.step * jnp.arange(self.size)
            return jnp.take(jnp.asarray(array), indices, self.axis, mode="clip")
        return array[self.slices]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that take the part out of an array that has all indices."""
        stop = self.start + (self.size - 1) * self.step + 1 if self.size else self.start
        return (slice(None),) * self.axis + (slice(self.start, stop, self.step),)

    def before(self, end: int) -> int:
        """The number of its indices below `end`."""
        return min(max(0, -((self.start - end) // self.step)), self.size)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of an array of the shape `whole`."""
        return (*whole[: self.axis], self.size, *whole[self.axis + 1 :])
