"""Batches of full size: rows that fill up a short one, and the mask that tells them from the others.

The rows repeat the batch's last one: its values are valid wherever those of data are, its names are in no need of a new
row of a vocabulary, and a loss of them is finite, so that its gradient times 0 is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: Default name of the mask in batches that are dicts.
MASK = "mask"


def filled_up(batch: Any, count: int, size: int, name: str) -> Any:
    """Return the batch of `count` rows with `size` rows, and with its mask; see `dflow.data.batches`."""
    if count < size:
        rows = np.minimum(np.arange(size), count - 1)
        batch = jax.tree_util.tree_map(lambda leaf: leaf[rows], batch)
    return with_entries(batch, {name: np.arange(size) < count})


def with_entries(batch: Any, entries: Mapping[str, Any]) -> Any:
    """Return the batch with further entries: by name in a dict, last in a tuple; else the tuple of it and them.

    Raises InputError if the dict has an entry of the name.
    """
    for name in entries:
        refuse_entry(batch, name)
    if isinstance(batch, Mapping):
        return type(batch)({**batch, **entries})  # type: ignore[call-arg]
    is_plain = isinstance(batch, tuple) and not hasattr(batch, "_fields")
    return (*batch, *entries.values()) if is_plain else (batch, *entries.values())


def refuse_entry(batch: Any, name: str) -> None:
    """Raise InputError if the batch is a dict that has an entry of the name."""
    if isinstance(batch, Mapping) and name in batch:
        raise InputError(
            f"batches: column {name!r}: expected no column of this name, which is for an entry that is added, got one",
            'rename the column, or the mask: pad="is_row"',
            at=caller(),
        )
