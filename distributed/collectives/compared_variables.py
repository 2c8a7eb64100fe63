"""A check that all processes of a group have made the same variables, with the same first values.

Why: a variable on all devices is one array to XLA, whatever is there. If two processes begin with different random
numbers, or with different models, nothing else finds out, and the training is of neither.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dflow.distributed.collectives.group_messages import MAIN
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.lowering.state.store import Store
from dflow.tracing.errors import StrategyError
from dflow.tracing.state.resources import Variable

#: Most bytes of each variable that are compared.
COMPARED_BYTES = 1 << 20


class _Seen(NamedTuple):
    """A variable as a process has it.

    part      the indices of the part on the process's first device
    is_whole  whether each device has the whole value
    checksum  checksum of the part, up to `COMPARED_BYTES`
    """

    name: str
    type: str
    part: str
    is_whole: bool
    checksum: int


_SAME_SEED = "make them in the same order, with the same names, and give random numbers the same seed"


def compare_variables(
    group: ProcessGroup,
    store: Store,
    made: Sequence[Variable],
    point: str = "the end of strategy.variables()",
    *,
    channel: str = MAIN,
    remedy: str = _SAME_SEED,
) -> None:
    """Wait for all processes; raise StrategyError in all unless they have made the same variables, of the same values.

    point    description of the point of the program, for errors; the remedy belongs to it
    channel  as for `ProcessGroup.exchange`

    Values are compared between processes that have the same parts of all variables, up to `COMPARED_BYTES` of each.
    """
    found = store.look([one.key for one in made], lambda values: [*map(_part, values)])
    seen = [_Seen(one.name, str(one.type), *part) for one, part in zip(made, found, strict=True)]
    facts: tuple[Callable[[_Seen], Any], ...] = (
        lambda one: (one.name, one.type, one.is_whole, one.checksum if one.is_whole else 0),
        lambda one: one.part,
        lambda one: one.checksum,
    )
    word = json.dumps([hashlib.sha256(json.dumps([*map(fact, seen)]).encode()).hexdigest() for fact in facts])
    words = [json.loads(one) for one in group.exchange(point, word, channel=channel)]
    by_part = {part: {checksum for _, other, checksum in words if other == part} for _, part, _ in words}
    if len({same for same, _, _ in words}) > 1 or any(len(checksums) > 1 for checksums in by_part.values()):
        texts = group.exchange(f"{point}, which differ", json.dumps(seen), channel=channel)
        by_name = dict(zip(group.names, msgspec.convert([*map(json.loads, texts)], list[list[_Seen]]), strict=True))
        _refuse(by_name, point, remedy)


def _refuse(seen: Mapping[str, Sequence[_Seen]], point: str, remedy: str) -> None:
    rows = [dict(zip(seen, row, strict=True)) for row in itertools.zip_longest(*seen.values())]
    number = next(number for number, row in enumerate(rows) if _is_unequal([*row.values()]))
    described = [f"{name}: {_described(one) if one else 'none'}" for name, one in rows[number].items()]
    raise StrategyError(
        f"{point}: expected the same variables with the same values on all workers, got as variable {number}: "
        f"{'; '.join(described)}",
        remedy,
    )


def _is_unequal(ones: Sequence[_Seen | None]) -> bool:
    kinds = {one and (one.name, one.type, one.is_whole) for one in ones}
    parts = {one.part for one in ones if one}
    return len(kinds) > 1 or any(len({one.checksum for one in ones if one and one.part == part}) > 1 for part in parts)


def _described(one: _Seen) -> str:
    return f"{one.name!r} {one.type} of checksum {one.checksum:08x}"


def _part(value: jax.Array) -> tuple[str, bool, int]:
    """Return the part of a value that the first device of this process has, whether it is the whole, its checksum."""
    shard = min(value.addressable_shards, key=lambda shard: shard.device.id)
    data = jax.random.key_data(shard.data) if jnp.issubdtype(value.dtype, jax.dtypes.extended) else shard.data
    rows = max(1, COMPARED_BYTES * len(data) // max(1, data.nbytes)) if data.ndim else 0
    compared = np.ascontiguousarray(data[:rows] if rows and rows < len(data) else data)
    return str(shard.index), value.is_fully_replicated, zlib.crc32(compared.tobytes())
