"""The rows of a table that have changed since a consumer last asked, for copies of it elsewhere.

Each shard has marks beside it (`row_marks`): the period of each row's last change. A consumer's question ends the
period on each shard, and yields the rows with marks of the periods that the consumer has not seen. It reads the marks
before the rows, in a later period: a row that changes meanwhile has a mark of that period, and is yielded again next
time. After the loop a variable on a task records what the consumer has seen.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.calls.function import jit
from dflow.scopes import colocate_with
from dflow.tables.shard_layout import ShardLayout
from dflow.tracing.errors import VariableError
from dflow.tracing.ir.row_marks import LIFE, PERIOD, SUFFIX, marks_type
from dflow.tracing.jax_frontend import is_tracing
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.running_sums import running_sums
from dflow.tracing.source import as_code
from dflow.tracing.state.container import outside_containers
from dflow.tracing.state.resources import Variable
from dflow.tracing.weak_by_identity import WeakDict

#: Most bytes of rows that are yielded at a time.
PIECE_BYTES = 64 << 20
#: The array of a piece has room for a power of this number of rows, so that few programs are compiled.
_ROOM_BASE = 64
#: Number of rows that `_first_true` looks at together.
_BLOCK = 64
_CONSUMER = re.compile(r"[\w.-]+")


#: By the marks of a table's first shard, what the questions for the table use again: the compiled `_end_period`; the
#: compiled `_piece`, by the room of a piece and the number of rows that it is taken from; and each consumer's record.
_questions: WeakDict[Variable, tuple[Callable[..., Any], Callable[..., Any], dict[str, Variable]]] = WeakDict()


def track_changed_rows(shard: Variable) -> None:
    """Have each change of a new variable mark the rows that it changes."""
    type = marks_type(shard.shape[0])
    with outside_containers():
        shard.marks = Variable(
            lambda: jnp.zeros(type.shape, type.dtype), name=shard.name + SUFFIX, near=shard, trainable=False
        )


def changed_rows(
    name: str, layout: ShardLayout, shards: Sequence[Variable], consumer: str
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]:
    """Yield changed rows as `ShardedVariable.changed_rows` does, of the table `name` in these shards."""
    given: Any = consumer
    if any(shard.marks is None for shard in shards):
        raise VariableError(
            f"sharded variable {name!r}: expected one that tracks changed rows, got one that does not",
            "make it with track_changes=True",
        )
    if not isinstance(given, str) or _CONSUMER.fullmatch(given) is None:
        raise VariableError(
            f"consumer of changed rows: expected a name, got {given!r}", "use letters, digits, '_', '.' and '-'"
        )
    if is_tracing():
        raise VariableError(
            f"changed_rows of {name!r} is called inside traced code, where the number of rows is not known",
            f"ask between steps: for numbers, rows in {as_code(name)}.changed_rows({consumer!r})",
        )
    return _pieces(layout, list(shards), consumer)


def _pieces(
    layout: ShardLayout, shards: list[Variable], consumer: str
) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]:
    marks: Any = shards[0].marks
    new_piece = functools.cache(lambda room, window: jit(functools.partial(_piece, room, window)))
    end_period, piece, records = _questions.setdefault(marks, (jit(functools.partial(_end_period)), new_piece, {}))
    if consumer not in records:
        zeros = np.zeros((len(shards), 2), np.int32)  # for each shard the last period seen, and the marks' life
        with outside_containers():
            records[consumer] = Variable(zeros, name=f"{marks.name}/{consumer}", near=shards[0], trainable=False)
    record = records[consumer]
    asked = np.array(end_period(shards, np.asarray(record.read())))
    counts = asked[:, 3].copy()
    largest = max(1, *(shard.shape[0] for shard in shards))
    row_bytes = max(1, shards[0].type.size_bytes // max(1, shards[0].shape[0]))
    most = max(1, PIECE_BYTES // (row_bytes * len(shards)))
    room = _ROOM_BASE
    while room < counts.max():
        room *= _ROOM_BASE
    # Few rows are found in all of the marks; of many, a piece has at most as many as the marks that are looked at.
    room, window = min(room, most), largest if counts.max() <= most else most
    for first in range(0, largest if counts.any() else 0, window):
        asked[:, 3] = first
        pieces = piece(room, window)(shards, asked)
        numbers, rows = [], []
        for shard, (positions, values, count) in enumerate(pieces):
            part = layout.part(shard)
            numbers.append(part.start + part.step * np.asarray(positions)[: int(count)])
            rows.append(np.asarray(values)[: int(count)])
        if sum(map(len, numbers)):
            yield np.concatenate(numbers).astype(np.int32), np.concatenate(rows)
    record.assign(asked[:, 1:3])


def _end_period(shards: list[Variable], seen: Any) -> jax.Array:
    """End the present period of each shard, given the last period and the life that the consumer has seen.

    Returns for each shard the period to begin after, the ended period, the life, and the number of rows that have
    changed in between.
    """
    found = []
    for shard, own in zip(shards, seen, strict=True):
        marks: Any = shard.marks
        with colocate_with(shard):
            period, life = own
            marks.scatter_add(jnp.full(1, PERIOD, jnp.int32), jnp.ones(1, jnp.int32))
            held = marks.read()
            after, ended = jnp.where(held[LIFE] == life, period, 0), held[PERIOD] - 1
            count = _is_between(held[:PERIOD], after, ended).sum(dtype=jnp.int32)
            found.append(jnp.stack([after, ended, held[LIFE], count]))
    return jnp.stack(found)


def _piece(room: int, window: int, shards: list[Variable], asked: Any) -> list[tuple[Any, Any, Any]]:
    """For each shard, the numbers and values of changed rows among `window` rows, and their count.

    `asked` has for each shard the first results of `_end_period`, and the first of these rows.
    """
    found = []
    for shard, own in zip(shards, asked, strict=True):
        marks: Any = shard.marks
        with colocate_with(shard):
            after, ended, life, first = own
            held, width = marks.read(), min(window, shard.shape[0])
            start = jnp.minimum(first, shard.shape[0] - width)
            positions = start + jnp.arange(width)
            is_changed = _is_between(jax.lax.dynamic_slice(held, [start], [width]), after, ended)
            # Marks of another life were made meanwhile; the next question yields all rows.
            is_changed &= (positions >= first) & (held[LIFE] == life)
            count = is_changed.sum(dtype=jnp.int32)
            numbers = first_rows(start + _first_true(is_changed, min(room, width)), count)
            found.append((numbers, first_rows(shard.gather(numbers), count), count))
    return found


def _is_between(marks: Any, after: Any, ended: Any) -> Any:
    return (marks > after) & (marks <= ended)


def _first_true(flags: Any, count: int) -> jax.Array:
    """The positions of the first `count` true elements, and any numbers after these."""
    blocks = jnp.pad(flags, (0, -len(flags) % _BLOCK)).reshape(-1, _BLOCK)
    ends = running_sums(blocks.sum(1, dtype=jnp.int32))
    wanted = jnp.arange(count, dtype=jnp.int32)
    block = jnp.minimum(jnp.searchsorted(ends, wanted, side="right"), len(blocks) - 1).astype(jnp.int32)
    before = jnp.where(block > 0, ends[block - 1], 0)
    inside = running_sums(blocks[block].astype(jnp.int8).T).T
    return block * _BLOCK + jnp.argmax(inside > (wanted - before)[:, None], axis=1).astype(jnp.int32)
