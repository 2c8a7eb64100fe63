"""The value of a table whose rows are stored in fewer bits: a lookup converts only the rows that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflow.tracing.ir.updates import looked_up


@dataclass(frozen=True)
class ScaledRows:
    """A table of `dtype`: its rows are those of `small` times their scale.

    scale  [rows], or None for 1
    """

    small: Any
    scale: Any
    dtype: Any

    def read(self) -> Any:
        """Return the whole table."""
        return self._wide(self.small, self.scale)

    def rows(self, indices: Any) -> Any:
        """Return the rows at `indices`."""
        return self._wide(
            looked_up(self.small, indices), None if self.scale is None else looked_up(self.scale, indices)
        )

    def _wide(self, small: Any, scale: Any) -> Any:
        if scale is None:
            return small.astype(self.dtype)
        factor = scale.reshape(*scale.shape, *[1] * (small.ndim - scale.ndim))
        return (small.astype(scale.dtype) * factor).astype(self.dtype)


def as_array(value: Any) -> Any:
    """Return the value of a variable as an array."""
    return value.read() if isinstance(value, ScaledRows) else value
