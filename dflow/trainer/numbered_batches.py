"""The batches of a `Trainer`, which it takes by number, and its error for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from dflow.tracing.errors import TrainingError
from dflow.tracing.source import caller


def refusal(fact: str, remedy: str) -> TrainingError:
    """Return the error of a trainer for arguments of the user's line."""
    return TrainingError(f"Trainer: {fact}", remedy, at=caller())


def check_count(batches: Any, needed: int) -> None:
    """Raise TrainingError if there are fewer batches than needed, as far as their number is known."""
    try:
        count = len(batches)
    except TypeError:
        return
    if count < needed:
        raise refusal(
            f"batches: expected {needed} for all steps, got {count}",
            "give dflow.data.batches(..., epochs=None), or fewer steps",
        )


def by_number(batches: Any) -> Callable[[int], Any]:
    """Return a function of the number of a batch. Raises TrainingError for batches without a number."""
    if callable(batches):
        return cast(Callable[[int], Any], batches)
    if not hasattr(batches, "__getitem__"):
        raise refusal(
            f"batches: expected a function of a number, or batches by number, got a {type(batches).__name__}, whose "
            "place is lost when the program ends",
            "give dflow.data.batches of arrays, or a function such as lambda number: data[number]",
        )
    return cast(Callable[[int], Any], batches.__getitem__)
