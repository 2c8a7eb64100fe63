"""Totals of an evaluation over its batches: sums over examples, and merged states of metrics.

Workers add their totals up as floats by name, in the ledger of steps. So a state that they share must add up: its
`merge` adds each array, or keeps it as a setting. Zeros are not sent, since most bins of an AUC are empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflow.distributed.training.metric_states import computed, is_state, on_host
from dflow.tracing.errors import TrainingError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.source import caller

#: The name of the number of examples, in the results of a step and of an evaluation.
EXAMPLES = "examples"
#: The name of the number of floats that were added, in those of workers; no name of theirs has no space.
_PARTS = "parts"

#: Sums over examples, and merged states on the host, by name.
Totals = dict[str, Any]


def add(totals: Totals, found: Mapping[str, Any]) -> None:
    """Add the totals of a batch."""
    for name, value in found.items():
        before = totals.get(name)
        if before is None:
            totals[name] = value
        else:
            totals[name] = on_host(before.merge(value)) if is_state(value) else before + value


def results(totals: Mapping[str, Any]) -> dict[str, float]:
    """Return the means, the values of states, and the number of examples. Raises TrainingError if there are none."""
    count = totals.get(EXAMPLES, 0.0)
    if not count:
        raise TrainingError("evaluate: expected at least one example, got none", "give it batches", at=caller())
    found: dict[str, float] = {}
    for name, total in totals.items():
        if is_state(total):
            values = computed(name, total)
        else:
            values = {name: float(total if name == EXAMPLES else total / count)}
        if twice := found.keys() & values.keys():
            raise TrainingError(
                f"evaluate: expected a name for each result, got {min(twice)!r} twice", "rename one", at=caller()
            )
        found |= values
    return found


class SharedTotals:
    """Totals as floats by name, which the ledger adds up over workers.

    types   results of the step for a batch, with types in place of arrays
    raises  TrainingError for a state that does not add up
    """

    def __init__(self, types: Mapping[str, Any]) -> None:
        total = np.zeros(())
        by_name = {name: type if is_state(type) else total for name, type in types.items()}
        self._types = by_name | {EXAMPLES: total}
        self._is_kept = {name: _is_kept(name, type) for name, type in self._types.items()}

    def floats(self, totals: Mapping[str, Any]) -> dict[str, float]:
        """Return the totals as floats."""
        found = {_PARTS: 1.0}
        for name, total in totals.items():
            for leaf, value in enumerate(jax.tree_util.tree_leaves(total)):
                array = np.asarray(value, np.float64).ravel()
                for place in np.flatnonzero(array).tolist():
                    found[f"{leaf} {place} {name}"] = float(array[place])
        return found

    def totals(self, floats: Mapping[str, float]) -> Totals:
        """Return the totals whose floats have these sums."""
        leaves = {name: jax.tree_util.tree_leaves(type) for name, type in self._types.items()}
        sums = {name: [np.zeros(leaf.shape) for leaf in types] for name, types in leaves.items()}
        for key, value in floats.items():
            if key != _PARTS:
                leaf, place, name = key.split(" ", 2)
                sums[name][int(leaf)].flat[int(place)] = value
        found: Totals = {}
        for name, type in self._types.items():
            means = (
                array / floats[_PARTS] if is_kept else array
                for array, is_kept in zip(sums[name], self._is_kept[name], strict=True)
            )
            arrays = [
                np.rint(mean).astype(np.int64) if _is_whole(leaf) else mean
                for mean, leaf in zip(means, leaves[name], strict=True)
            ]
            found[name] = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(type), arrays)
        return found


def _is_whole(leaf: Any) -> bool:
    return leaf.dtype.kind in "iub"


def _is_kept(name: str, state: Any) -> list[bool]:
    """Return for each array of a state whether `merge` keeps it instead of adding it, as two made-up states show."""
    types, tree = jax.tree_util.tree_flatten(state)
    if not is_state(state):
        return [False]
    one, other = _made_up(types, 3), _made_up(types, 1000)

    def merged(first: Any, second: Any) -> list[Any]:
        both = jax.tree_util.tree_unflatten(tree, first).merge(jax.tree_util.tree_unflatten(tree, second))
        leaves, structure = jax.tree_util.tree_flatten(on_host(both))
        return leaves if bool(structure == tree) else [None] * len(types)  # type: ignore[operator]

    try:
        forth, back = merged(one, other), merged(other, one)
    except Exception as error:
        raise _no_sum(name, f"one that raises {type(error).__name__}: {error}") from error
    found = []
    for number, (a, b, ab, ba) in enumerate(zip(one, other, forth, back, strict=True)):
        found.append(np.array_equal(ab, a) and np.array_equal(ba, b))
        if not found[-1] and not (np.array_equal(ab, a + b) and np.array_equal(ba, a + b)):
            got = "another structure" if ab is None else f"{_first(ab)} of {_first(a)} and {_first(b)}"
            raise _no_sum(name, f"one that makes {got} in array {number}, {array_type_of(types[number])}")
    return found


def _made_up(types: Sequence[Any], first: int) -> list[Any]:
    """Return arrays of these types, of numbers that differ from each other, and from those with another `first`."""
    return [
        np.full(type.shape, first + (first // 3 + 1) * index, np.int64 if _is_whole(type) else np.float64)
        for index, type in enumerate(types)
    ]


def _first(array: Any) -> str:
    return f"{array.flat[0]:g}" if array.size else "nothing"


def _no_sum(name: str, got: str) -> TrainingError:
    return TrainingError(
        f"evaluate: {name or 'the state of a metric'}: expected a merge that adds each array, or keeps it, on a "
        f"cluster, got {got}",
        "return a state of sums, such as dflow.metrics.Sums, or evaluate in one process",
        at=caller(),
    )
