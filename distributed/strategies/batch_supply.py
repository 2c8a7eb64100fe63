"""The batches of a worker's loop: an iterable's, in order, or a function's, by the numbers of the steps.

Why a function: which batch a step uses then depends on its number alone, and not on the worker that does it or on what
was done before. So a step that is done again, after a death or by a resumed job, uses the same batch, and none is left
out or used twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dflow.tracing.errors import StrategyError

#: In place of a batch, after the last one.
END = object()


class BatchSupply:
    """The batches of one loop. Raises StrategyError unless `batches` is an iterable or a function of a number."""

    def __init__(self, batches: Iterable[Any] | Callable[[int], Any]) -> None:
        self._of: Callable[[int], Any] | None = None
        self._rest: Iterator[Any] = iter(())
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

    def take(self, number: int) -> Any:
        """Return the batch of step `number`, or the iterable's next one; `END` after its last."""
        return next(self._rest, END) if self._of is None else self._of(number)

    def put_back(self, batch: Any) -> None:
        """Give back a batch whose step failed: the next step of an iterable takes it."""
        if self._of is None:
            self._rest = itertools.chain([batch], self._rest)
