"""The methods that update rows of a variable, in one piece or in shards."""

from __future__ import annotations

from typing import Any


class RowUpdates:
    """Updates of rows by their indices; a subclass defines `_scatter`."""

    def scatter_update(self, indices: Any, rows: Any) -> None:
        """Replace the rows at `indices`; of rows for one index any one stays.

        Here and in every `scatter_`: `indices` are integers of any shape and `rows` has `indices.shape + shape[1:]`; a
        negative index counts from the end; a row that does not exist is not written. It is one update, in place, of
        a variable or of each shard. Raises VariableShapeError.
        """
        self._scatter("scatter_update", indices, rows)

    def scatter_add(self, indices: Any, rows: Any) -> None:
        """Add `rows` to the rows at `indices`; rows for one index add up."""
        self._scatter("scatter_add", indices, rows)

    def scatter_sub(self, indices: Any, rows: Any) -> None:
        """Subtract `rows` from the rows at `indices`; rows for one index add up."""
        self._scatter("scatter_sub", indices, rows)

    def scatter_mul(self, indices: Any, rows: Any) -> None:
        """Multiply the rows at `indices` by `rows`."""
        self._scatter("scatter_mul", indices, rows)

    def scatter_max(self, indices: Any, rows: Any) -> None:
        """Keep the larger of the rows at `indices` and `rows`, element by element."""
        self._scatter("scatter_max", indices, rows)

    def scatter_min(self, indices: Any, rows: Any) -> None:
        """Keep the smaller of the rows at `indices` and `rows`, element by element."""
        self._scatter("scatter_min", indices, rows)

    def _scatter(self, kind: str, indices: Any, rows: Any) -> None:
        """Update the rows; `kind` is the name of the method."""
        raise NotImplementedError
