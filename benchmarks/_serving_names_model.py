"""A model of names by hand, as a server without tables has it: a dict from names to rows, and a program of JAX.

See `benchmarks/serving_names.py`. It is used in environments of other servers, whose Python need not have dflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: Most rows of names in a call; fewer are padded to a power of two, so that few programs are compiled.
MOST = 16


class NamesModel:
    """Scores of rows of names, which are strings or, with `of_bytes`, their bytes; `folder` has `values.npz`."""

    def __init__(self, folder: Path, *, of_bytes: bool = False) -> None:
        values = dict(np.load(folder / "values.npz"))
        names = values.pop("names").tolist()
        self._numbers = {name.encode() if of_bytes else name: number for number, name in enumerate(names)}
        table, hidden, out = (jnp.asarray(values[name]) for name in ("table", "hidden", "out"))

        @jax.jit
        def score(numbers: Any) -> Any:
            rows = table[numbers].reshape(len(numbers), -1)
            return jax.nn.relu(rows @ hidden) @ out

        self._score = score
        size = 1
        while size <= MOST:
            score(np.zeros((size, len(hidden) // table.shape[1]), np.int32)).block_until_ready()
            size *= 2

    def __call__(self, names: Sequence[str | bytes], rows: int) -> np.ndarray[Any, Any]:
        """Return the score of each of `rows` rows of names, f32[rows]; the names are one list."""
        numbers = np.fromiter(map(self._numbers.__getitem__, names), np.int32, len(names)).reshape(rows, -1)
        padded = np.zeros((1 << (rows - 1).bit_length(), numbers.shape[1]), np.int32)
        padded[:rows] = numbers
        return np.asarray(self._score(padded))[:rows]
