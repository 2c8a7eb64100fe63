"""The batches of a worker's loop: an iterable's, in order, or a function's, by the numbers of the steps.

Why a function: which batch a step uses then depends on its number alone, and not on the worker that does it or on what
was done before. So a step that is done again, after a death or by a resumed job, uses the same batch, and none is left
out or used twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from jax import tree_util

from dflow.tracing.argument_ids import is_list_of_strings, with_ids
from dflow.tracing.column_tables import refuse_table
from dflow.tracing.errors import StrategyError
from dflow.tracing.path_names import leaf_names

#: In place of a batch, after the last one.
END = object()


class BatchSupply:
    """Gives a loop its batches, from an iterable or a function of the batch's number, which may return `END`.

    may_end  whether the caller handles batches that end early; if false, a standalone run raises StrategyError
    first    number that the program gives the function's batch 0
    raises   StrategyError for other `batches`, and for a table, whose iteration gives the names of its columns
    """

    def __init__(self, batches: Iterable[Any] | Callable[[int], Any], *, may_end: bool = False, first: int = 0) -> None:
        self.may_end, self._first = may_end, first
        self._of: Callable[[int], Any] | None = None
        self._rest: Iterator[Any] = iter(())
        #: Number of the batch that `take` returned last, -1 before the first; and its place in an iterable.
        self.taken = self._place = -1
        #: Number of batches that `take` returned and that were not put back, and whether it returned `END` last.
        self.count, self.has_ended = 0, False
        #: Batches that `take` returns before others: those of an iterable that were put back or taken early, or the one
        #: that a function returned early, with its number. Each has the error of taking it early, which `take` raises.
        self._early: deque[tuple[int | None, Any, Exception | None]] = deque()
        remedy = "give dflow.data.batches(data, size, epochs=None), which takes its rows"
        refuse_table("run: batches", batches, remedy, StrategyError)
        try:
            self._rest = iter(batches)  # type: ignore[arg-type]
        except TypeError:
            if not callable(batches):
                raise StrategyError(
                    f"run: batches: expected an iterable or a function of the step's number, got {batches!r}",
                    "give a list, a generator, or a function such as lambda step: data[step]",
                ) from None
            self._of = batches

    @property
    def is_numbered(self) -> bool:
        """Whether a function gives the batches."""
        return self._of is not None

    @property
    def newest(self) -> str:
        """The number of the batch that was taken last, for errors; empty before the first."""
        if self.taken < 0:
            return ""
        return f"batch {self._first + self.taken}" if self.is_numbered else f"batch {self._place} of this worker's"

    def take(self, number: int) -> Any:
        """Return the function's batch of this number, or the iterable's next batch; `END` after the last one.

        Raises the error of taking this batch early.
        """
        self.taken, self._place = number, self.count
        _, batch, error = self._early.popleft() if self._has(number) else (number, self._next(number), None)
        if error is not None:
            raise error
        self.has_ended = batch is END
        self.count += batch is not END
        return batch

    def take_early(self, number: int) -> Any:
        """Return the batch that `take(number)` will return, with read-only copies of its NumPy arrays.

        `END` after the last batch, and in place of one whose error `take` will raise.
        """
        if not self._has(number):
            self._early.clear()
            batch, failure = END, None
            try:
                batch = self._next(number)
                batch = batch if batch is END else tree_util.tree_map(_owned, with_ids_of(batch))
            except Exception as error:
                batch, failure = END, error
            self._early.append((number, batch, failure))
        return self._early[0][1]

    def put_back(self, batch: Any) -> None:
        """Give back a batch that no step has used. An iterable's is taken again next; a function is called again."""
        self.count -= 1
        if self._of is None:
            self._early.appendleft((None, batch, None))

    def _has(self, number: int) -> bool:
        return bool(self._early) and (self._of is None or self._early[0][0] == number)

    def _next(self, number: int) -> Any:
        return next(self._rest, END) if self._of is None else self._of(number)


def with_ids_of(batch: Any) -> Any:
    """Return the batch with ids in place of its strings and wide integers, so that the call has these very arrays."""
    return with_ids(batch, lambda: leaf_names("run: batches: batch", batch, is_list_of_strings))[0]


def _owned(leaf: Any) -> Any:
    """Return a read-only copy of a NumPy array, whose memory an iterator may use again; any other leaf as it is.

    Read-only, since the lookups of the step have begun with its values: the step must not change them in place.
    """
    if not isinstance(leaf, np.ndarray):
        return leaf
    copied = leaf.copy()
    copied.setflags(write=False)
    return copied
