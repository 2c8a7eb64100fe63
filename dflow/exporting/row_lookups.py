"""Calls of an exported function whose tables are elsewhere: only the rows that it looks up come here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import export

from dflow.tables.routing import route
from dflow.tables.shard_layout import ShardLayout
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.state_primitives import gather_p
from dflow.tracing.rows.id_rows import IdRows
from dflow.tracing.state.resources import Variable


@dataclass(frozen=True)
class RowLookups:
    """The programs of a function around its lookups (`lookup_programs.py`), and the table of each lookup.

    id_rows  by name, how ids have rows in the tables with a vocabulary
    """

    tables: Sequence[str]
    numbers: export.Exported
    results: export.Exported
    asked: export.Exported | None = None
    id_rows: Mapping[str, IdRows] = field(default_factory=dict)


def rows_at(table: Variable, numbers: Any) -> Any:
    """Return the rows of a variable at integers of any shape; a number past an end stands for the row at that end.

    Each row is looked up once, where the variable is, and only its number and its values travel.
    """
    inside = jnp.clip(numbers, 0, table.shape[0] - 1).astype(jnp.int32).reshape(-1)
    shape = (*numbers.shape, *table.shape[1:])
    if not inside.size:
        return jnp.zeros(shape, table.dtype)
    way = route(ShardLayout(table.shape, 1), inside)
    found = first_rows(gather_p.bind(way.rows[0], handle=table.handle, once=True), way.counts[0])
    return jnp.take(found, way.positions, axis=0, mode="clip").reshape(shape)
