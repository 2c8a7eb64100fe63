"""The batches of a loop: in order and each once, whether they are taken early, given back, or fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dflow.distributed.training.batch_supply import END, BatchSupply


def failing() -> Iterator[int]:
    yield 0
    raise ZeroDivisionError


def test_a_batch_taken_early_is_the_next_one() -> None:
    supply = BatchSupply(iter("abc"))
    assert [supply.take_early(0), supply.take_early(0), supply.take(0), supply.take(1)] == ["a", "a", "a", "b"]
    assert [supply.take_early(2), supply.take(2), supply.take_early(3), supply.take(3)] == ["c", "c", END, END]


def test_a_batch_given_back_comes_before_one_taken_early() -> None:
    supply = BatchSupply(iter("abc"))
    first = supply.take(0)
    supply.take_early(1)
    supply.put_back(first)
    assert [supply.take_early(0), *(supply.take(number) for number in range(4))] == ["a", "a", "b", "c", END]


def test_an_error_of_a_batch_taken_early_is_raised_when_it_is_taken() -> None:
    supply = BatchSupply(failing())
    assert [supply.take(0), supply.take_early(1)] == [0, END]
    with pytest.raises(ZeroDivisionError):
        supply.take(1)
    assert supply.take(2) is END


def test_a_function_is_asked_once_for_each_batch() -> None:
    asked: list[int] = []

    def batch(number: int) -> int:
        asked.append(number)
        return -number

    supply = BatchSupply(batch)
    assert [supply.take_early(3), supply.take(3), supply.take_early(4)] == [-3, -3, -4]
    assert [supply.take(7), supply.take(4), supply.take_early(9)] == [-7, -4, -9]  # of other claims
    assert asked == [3, 4, 7, 9]


def test_arrays_taken_early_are_copies() -> None:
    memory = np.zeros(2)
    given: Iterator[Any] = ({"x": memory, "n": number} for number in itertools.count())
    supply = BatchSupply(given)
    early = supply.take_early(0)
    memory[:] = 1
    assert supply.take(0) is early
    assert (early["x"].tolist(), early["n"]) == ([0.0, 0.0], 0)
    with pytest.raises(ValueError, match="read-only"):  # what a step changes would not be what was looked up early
        early["x"] += 1
