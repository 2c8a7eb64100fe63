"""Reads of the same variables, step after step, at a small cost for each.

A read remembers where its variables are from step to step, in the table or with a call, and takes their values from
there without a lock. It makes no call of a Python function for each variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import numpy as np

from dflow.lowering.state.held_value import HeldValue, StepState
from dflow.lowering.state.store import Store, has_view
from dflow.lowering.values.computed import wait_until_computed

_VALUE, _STEP, _IS_READY = attrgetter("value"), attrgetter("step"), methodcaller("is_ready")


#: Returns the values from where they were at the last read; None if they are there no longer.
_Look = Callable[[], Sequence[Any] | None]


def repeated_views(store: Store, keys: Sequence[str]) -> Callable[[], Sequence[Any]]:
    """Return a function for repeated `store.views(keys)`; thread-safe."""
    look: _Look | None = None

    def views() -> Sequence[Any]:
        """Return the values at one moment; see `Store.views`."""
        nonlocal look
        find = look  # read once: another thread may set it to None
        values = find() if find is not None else None
        if values is not None:
            try:  # `suppress` would cost as much as a view
                if not all(map(_IS_READY, values)):
                    wait_until_computed(values)
                return [*map(np.asarray, values)]
            except RuntimeError:  # a program has overwritten a value since
                pass
        values = store.views(keys)
        look = _look_at(store, keys)
        return values

    return views


def _look_at(store: Store, keys: Sequence[str]) -> _Look | None:
    """Return the function for the next read, if one step holds all variables, or the table does."""
    with store.table.lock:  # else another step could take a variable, and its index would be that of the new step
        held = [store.table.entry(key) for key in keys]
        step = held[0].step if held else None
        if any(entry.step is not step for entry in held):
            return None
        if step is None:
            return partial(_in_table, store, keys, held) if all(has_view(entry.value) for entry in held) else None
        entries, written = step.entries, step.written
        if written is None or [entries[entry.index] for entry in held] != held:
            return None
        indices = [entry.index for entry in held]
    if not all(has_view(written[index]) for index in indices):
        return None
    first = indices[0]
    is_range = len(indices) == 1 or indices == [*range(first, first + len(indices))]
    pick = itemgetter(slice(first, first + len(indices))) if is_range else itemgetter(*indices)
    return partial(_in_step, step, entries, pick)


def _in_table(store: Store, keys: Sequence[str], entries: list[HeldValue]) -> Sequence[Any] | None:
    values = [*map(_VALUE, entries)]
    # No value of a variable comes back once it is replaced. So if each variable has the same value after none was with
    # a step, and its entry is still in the table, there was a moment when all had these values.
    are_there = (
        not any(map(_STEP, entries))
        and all(map(is_, values, map(_VALUE, entries)))
        and [*map(store.table.entries.get, keys)] == entries
    )
    return values if are_there else None


def _in_step(
    step: StepState, entries: Sequence[HeldValue], pick: Callable[[Any], Sequence[Any]]
) -> Sequence[Any] | None:
    # In this order: if the step has the same entries now, it held these values when they were taken from it, since it
    # gets a new list of entries each time that it takes values from the table.
    written = step.written
    are_there = written is not None and step.results is None and step.entries is entries
    return pick(written) if are_there else None
