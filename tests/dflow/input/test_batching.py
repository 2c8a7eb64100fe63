"""`dflow.data.batches`: elements stacked to batches, shuffled, by epochs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.data import batches
from dflow.input import batching
from tests.effort import examples


def _rows(made: Any) -> list[int]:
    return [int(number) for batch in made for number in batch]


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(0, 20),
    size=st.integers(1, 7),
    shuffle=st.one_of(st.just(False), st.integers(1, 30)),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
    arrays=st.booleans(),
    seed=st.integers(0, 3),
)
def test_batches_hold_each_element_once_an_epoch(
    count: int, size: int, shuffle: Any, epochs: int, drop: bool, arrays: bool, seed: int
) -> None:
    data: Any = np.arange(count) if arrays else list(range(count))
    options: dict[str, Any] = {"shuffle": shuffle, "epochs": epochs, "drop_remainder": drop, "seed": seed}
    made = batches(data, size, **options)
    found = [batch.tolist() for batch in made]
    assert [batch.tolist() for batch in made] == found
    assert len(made) == len(found)
    kept = count // size * size if drop else count
    of_epoch = [size] * (kept // size) + ([kept % size] if kept % size else [])
    assert [len(batch) for batch in found] == of_epoch * epochs
    for epoch in range(epochs):
        rows = [row for batch in found[epoch * len(of_epoch) : (epoch + 1) * len(of_epoch)] for row in batch]
        assert set(rows) <= set(range(count))
        assert len(set(rows)) == kept
        if not shuffle:
            assert rows == list(range(kept))
        elif not drop:
            # An element is at most a buffer's length ahead of its original position.
            assert all(row < place + int(shuffle) + 1 for place, row in enumerate(rows))


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(0, 20),
    size=st.integers(1, 7),
    shuffle=st.booleans(),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_a_batch_by_its_number_is_that_of_an_iteration(
    count: int, size: int, shuffle: bool, epochs: int, drop: bool, order: Any
) -> None:
    data = {"x": np.arange(count), "y": -np.arange(count)}
    made = batches(data, size, shuffle=shuffle, epochs=epochs, drop_remainder=drop, seed=3)
    expected = [(batch["x"].tolist(), batch["y"].tolist()) for batch in made]
    for number in order.sample(range(len(expected)), len(expected)):
        assert (made[number]["x"].tolist(), made[number]["y"].tolist()) == expected[number]
    for number in (-1, len(expected)):
        with pytest.raises(IndexError, match=f"expected 0 or more, below {len(expected)}, got {number}"):
            made[number]


def test_a_batch_by_its_number_needs_arrays_in_a_known_order() -> None:
    assert batches(np.arange(4), 2, epochs=None)[1001].tolist() == [2, 3]
    with pytest.raises(dflow.InputError, match=r"expected arrays or a sequence, and .*, got a generator"):
        batches((number for number in range(3)), 2)[0]
    with pytest.raises(dflow.InputError, match="shuffle=3"):
        batches(np.arange(9), 2, shuffle=3)[0]


def test_rows_of_arrays_stay_together_and_each_epoch_has_an_order_of_its_own() -> None:
    data = {"x": np.arange(20), "y": -np.arange(20)}
    made = list(batches(data, 5, shuffle=True, epochs=2, seed=1))
    assert all((batch["x"] == -batch["y"]).all() for batch in made)
    first, second = (np.concatenate([batch["x"] for batch in made[at : at + 4]]).tolist() for at in (0, 4))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    other = np.concatenate([batch["x"] for batch in batches(data, 5, shuffle=True, seed=2)]).tolist()
    assert other != first


def test_every_order_of_a_shuffle_comes_up() -> None:
    seen = Counter(tuple(_rows(batches(range(3), 3, shuffle=3, seed=seed))) for seed in range(200))
    assert len(seen) == 6


def test_iterables_without_end_and_epochs_without_end_are_batched() -> None:
    assert [batch.tolist() for batch in itertools.islice(batches(itertools.count(), 2), 2)] == [[0, 1], [2, 3]]
    forever = batches([1, 2, 3], 2, epochs=None)
    assert [batch.tolist() for batch in itertools.islice(forever, 4)] == [[1, 2], [3], [1, 2], [3]]
    assert list(batches([], 2, epochs=None)) == []
    with pytest.raises(dflow.InputError, match="expected at least the 5 rows of a batch, got 3"):
        batches({"x": np.ones((3, 2))}, 5, epochs=None, drop_remainder=True)
    with pytest.raises(TypeError, match="without end"):
        len(forever)


@pytest.mark.parametrize("shuffle", [False, 3, 8])
def test_an_iterable_may_give_one_buffer_again_and_again(shuffle: int | bool) -> None:
    class Foreign:
        """A tensor of another library, which NumPy reads without a copy."""

        def __init__(self, memory: Any) -> None:
            self.memory = memory

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.array(self.memory, dtype, copy=copy)

    def rows() -> Iterator[Any]:
        row, tensor = np.zeros(2, np.float32), Foreign(np.zeros(1))
        for number in range(8):
            row[:] = number
            tensor.memory[:] = number
            yield {"row": row, "tensor": tensor, "number": number}

    made = list(batches(rows(), 3, shuffle=shuffle))
    numbers = [batch["number"].tolist() for batch in made]
    assert [batch["row"][:, 1].tolist() for batch in made] == numbers
    assert [batch["tensor"][:, 0].tolist() for batch in made] == numbers
    assert sorted(itertools.chain(*numbers)) == list(range(8))
    assert shuffle or numbers == [[0, 1, 2], [3, 4, 5], [6, 7]]


@given(st.lists(st.sampled_from([1, 2.5, True, np.int8(3), np.float32(4), 5j]), min_size=1), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(100))
def test_a_batch_is_what_stacking_its_elements_gives(elements: list[Any], size: int) -> None:
    for batch, start in zip(batches(elements, size), range(0, len(elements), size), strict=True):
        stacked = np.stack([np.asarray(element) for element in elements[start : start + size]])
        assert batch.dtype == stacked.dtype
        np.testing.assert_array_equal(batch, stacked)


def test_a_batch_that_would_be_larger_than_its_data_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_AT_ONCE_BYTES", 64)
    (batch,) = batches((np.full(4, number) for number in range(9)), 10**15)
    assert batch[:, 3].tolist() == list(range(9))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ((np.zeros(3),), r"of the shape \(3,\) where the first of its batch has \(2,\)"),
        ((np.zeros(2), 1), "differs from the first of its batch"),
    ],
)
def test_elements_that_do_not_stack_are_refused(second: Any, says: str) -> None:
    with pytest.raises(dflow.InputError, match=says):
        list(batches([(np.zeros(2),), second], 2))


def test_bytes_and_strings_keep_zeros_at_their_end() -> None:
    texts: list[Any] = [b"ab\0\0", b"c"], ["a\0", "b"]
    columns = next(iter(dflow.data.numpy_batches([texts])))
    assert [column.tolist() for column in columns] == [*texts]
    elements = [{"bytes": first, "text": second} for first, second in zip(*texts, strict=True)]
    for shuffle in (False, 1):
        (batch,) = batches(elements, 2, shuffle=shuffle)
        assert [batch["bytes"].tolist(), batch["text"].tolist()] == [*texts]
