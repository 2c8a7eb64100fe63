"""Short batches filled up with a mask, and sequences in buckets of like length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.data import batches, bucket_by_sequence_length
from dflow.distributed import AllReduce, Async, Hybrid, Sync
from tests.effort import examples

IDS = np.arange(7)
NAMES = [f"name {row}" for row in IDS]


def test_a_short_batch_repeats_its_last_row_and_masks_it() -> None:
    made = batches({"id": IDS, "name": NAMES}, 3, pad=True)
    last = list(made)[-1]
    assert (last["id"].tolist(), last["name"].tolist()) == ([6, 6, 6], ["name 6"] * 3)
    assert [batch["mask"].tolist() for batch in made] == [[True] * 3, [True] * 3, [True, False, False]]
    assert made[2]["mask"].tolist() == [True, False, False]
    assert {batch["mask"].dtype for batch in made} == {np.dtype(bool)}
    assert len(made) == 3
    assert type(next(iter(batches(OrderedDict(z=IDS, a=IDS), 9, pad="is_row")))) is OrderedDict


@pytest.mark.parametrize(
    ("data", "form"),
    [
        ((IDS, IDS * 2), [[6] * 3, [12] * 3, [True, False, False]]),
        (IDS, [[6] * 3, [True, False, False]]),
        ([*IDS.tolist()], [[6] * 3, [True, False, False]]),
        ((int(id) for id in IDS), [[6] * 3, [True, False, False]]),
    ],
    ids=["tuple", "array", "list", "stream"],
)
def test_other_batches_have_the_mask_last(data: Any, form: list[Any]) -> None:
    assert [part.tolist() for part in list(batches(data, 3, pad=True))[-1]] == form


def test_a_masked_loss_is_that_of_the_rows_alone() -> None:
    weights = dflow.Variable(jnp.ones(2), name="masked/w")

    @dflow.jit
    def step(batch: Any) -> Any:
        def loss() -> Any:
            losses = jnp.log(batch["x"] @ weights)
            return jnp.mean(losses, where=batch["mask"])

        return dflow.value_and_grad(loss, [weights])()

    x = np.random.default_rng(0).random((5, 2)).astype("f4")
    whole = step({"x": x, "mask": np.ones(5, bool)})
    (padded,) = map(step, batches({"x": x}, 8, pad=True))
    assert jax.tree.all(jax.tree.map(lambda one, other: np.allclose(one, other, rtol=1e-6), padded, whole))


@pytest.mark.parametrize("strategy", [Async, Sync, AllReduce, Hybrid])
def test_a_new_shape_in_a_run_is_told_once_with_the_remedy(strategy: Any) -> None:
    seen = dflow.Variable(jnp.zeros(()), name=f"seen_{strategy.__name__}")

    @dflow.jit
    def step(batch: Any) -> None:
        seen.assign_add(batch["x"].sum())

    data = {"x": np.ones(10, np.float32)}
    run = strategy(dflow.connect()).run
    says = r"step is traced and compiled again during a run, because of batch/x: f32\[4\] -> f32\[2\](.|\n)*pad=True"
    with pytest.warns(dflow.RetraceWarning, match=says) as told:
        list(run(step, batches(data, 4, epochs=2), steps=6))
    assert len(told) == 1
    step.clear_cache()
    list(run(step, batches(data, 4, epochs=2, pad=True), steps=6))


def test_other_changes_in_a_run_have_their_own_remedies() -> None:
    step = dflow.jit(lambda x, scale: x * scale, static_argnames="scale")
    run = Async(dflow.connect()).run
    with pytest.warns(
        dflow.RetraceWarning, match=r"because of scale: 1 -> 2 (.|\n)*  pass what changes (.*) as an array"
    ):
        list(run(step, lambda number: (1.0, 1 + number // 2), steps=4))
    step = dflow.jit(lambda x: x)
    with pytest.warns(dflow.RetraceWarning, match=r"because of x: ~i32\[3\] -> ~i32\[2\] (.|\n)*pad=True"):
        list(run(step, lambda number: jnp.full(3 - number // 2, 1), steps=4))


@pytest.mark.parametrize("parts", [1, 2])
def test_lengths_of_buckets_are_traced_without_a_warning(parts: int) -> None:
    @dflow.jit
    def step(batch: Any) -> Any:
        return batch["x"].sum()

    data = {"x": [np.ones(length, np.float32) for length in range(1, 15)], "y": np.arange(14)}
    made = bucket_by_sequence_length(data, "x", [2, 4, 6, 8, 10, 12, 14], 3)

    def batch(number: int) -> Any:
        """Return the batch of that many workers together."""
        return jax.tree.map(lambda array: np.concatenate([array] * parts), made[number])

    run = Async(dflow.connect()).run(step, batch, steps=len(made))
    assert len(list(run)) == 7 == len(step.trace_log())


def rows(made: Any, sequence: Any = "x") -> list[list[Any]]:
    """Return the sequences of batches as lists, without what was added."""
    found = []
    for batch in made:
        is_row = batch.get("mask", np.ones(len(batch["length"]), bool))
        for row in np.flatnonzero(is_row):
            length = int(batch["length"][row])
            assert not batch[sequence][row, length:].any()
            found.append(batch[sequence][row, :length].tolist())
    return found


@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.sets(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=examples(60), deadline=None)
def test_each_element_is_in_one_batch_of_its_bucket(
    lengths: list[int], bounds: set[int], size: int, shuffle: bool
) -> None:
    boundaries = sorted({*bounds, 9})
    data = [{"x": np.arange(1, length + 1) + 10 * row, "y": row} for row, length in enumerate(lengths)]
    made = bucket_by_sequence_length(data, "x", boundaries, size, shuffle=shuffle, seed=3)
    found = list(made)
    assert sorted(rows(found)) == sorted(element["x"].tolist() for element in data)
    for batch in found:
        boundary = batch["x"].shape[1]
        assert batch["x"].shape[0] == len(batch["mask"]) == size
        assert all(min(b for b in boundaries if b >= length) == boundary for length in batch["length"])
    assert len(made) == len(found)
    by_number = [made[number] for number in range(len(made))]
    assert jax.tree.all(jax.tree.map(np.array_equal, by_number, found))
    if not shuffle:  # a stream has the same batches
        assert jax.tree.all(
            jax.tree.map(np.array_equal, list(bucket_by_sequence_length(iter(data), "x", boundaries, size)), found)
        )
    full = list(bucket_by_sequence_length(data, "x", boundaries, size, drop_remainder=True))
    assert sorted(rows(full)) == sorted(rows(batch for batch in found if batch["mask"].all())) if not shuffle else True


def tables() -> Iterator[Any]:
    lists = [[1, 2, 3], [4], [5, 6], []]
    yield {"x": lists, "y": [0, 1, 2, 3]}
    for library, make in (("pandas", "DataFrame"), ("pyarrow", "table"), ("polars", "DataFrame")):
        yield getattr(pytest.importorskip(library), make)({"x": lists, "y": [0, 1, 2, 3]})


def test_columns_of_lists_are_padded_in_every_container() -> None:
    for table in tables():
        first, last = bucket_by_sequence_length(table, "x", [2, 4], 3, padding=0)
        assert first["x"].tolist() == [[4, 0], [5, 6], [0, 0]]
        assert (first["y"].tolist(), first["length"].tolist()) == ([1, 2, 3], [1, 2, 0])
        assert (last["x"].tolist(), last["mask"].tolist()) == ([[1, 2, 3, 0]] * 3, [True, False, False])
        with pytest.raises(
            dflow.InputError, match=r"column 'x': expected rows of one shape, got .*(.|\n)*bucket_by_se"
        ):
            batches(table, 2)


def test_several_sequences_and_other_forms() -> None:
    pairs = [([1, 2], ["a"], 0.5), ([3], ["b", "c", "d"], 1.5)]
    (batch,) = bucket_by_sequence_length(pairs, [0, 1], [3], 2, padding={1: "-"}, drop_remainder=True)
    assert [part.tolist() for part in batch] == [
        [[1, 2, 0], [3, 0, 0]],
        [["a", "-", "-"], ["b", "c", "d"]],
        [0.5, 1.5],
        [2, 3],
    ]
    (batch,) = bucket_by_sequence_length([np.ones(2), np.ones(1)], (), [2], 2)
    assert [part.tolist() for part in batch] == [[[1, 1], [1, 0]], [2, 1], [True, True]]


def test_a_stream_may_use_its_memory_again_and_empty_lists_keep_the_dtype() -> None:
    def elements() -> Iterator[Any]:
        memory = np.zeros(2, np.int32)
        for number in range(6):
            memory[:] = number
            yield memory

    found = list(bucket_by_sequence_length(elements(), (), [2], 3, shuffle=4))
    assert sorted(row for batch, *_ in found for row in batch[:, 0].tolist()) == list(range(6))
    (batch,) = bucket_by_sequence_length([{"x": []}, {"x": [np.int64(3), 4]}], "x", [2], 2)
    assert (batch["x"].dtype, batch["x"].tolist()) == (np.int64, [[0, 0], [3, 4]])


LONG = {"x": [[1], [1, 2, 3]], "y": [1, 2]}
REFUSED: dict[str, tuple[Any, str]] = {
    "long": ((LONG, "x", [2], 2), "element 1: expected a length of at most 2, the last boundary, got 3"),
    "long element": (([[1], [1, 2, 3]], (), [2], 2), "element 1: expected a length of at most 2"),
    "no column": ((LONG, "z", [3], 2), r"expected entries of the data, got 'z'(.|\n)*'x', 'y'"),
    "no entry": (([{"x": [1]}], "z", [3], 2), r"expected entries of the data, got 'z'(.|\n)*'x'"),
    "no sequence": ((LONG, ["x", "y"], [3], 2), "column 'y': expected sequences, got one value in each row"),
    "another": (
        ({**LONG, "y": [[1], [2, 3]]}, "x", [3], 2),
        r"column 'y': expected rows of one shape(.|\n)*\['x', 'y'\]",
    ),
    "boundaries": ((LONG, "x", [4, 2], 2), r"increasing whole numbers, from 1, got \[4, 2\]"),
    "size": ((LONG, "x", [4], 0), "expected a whole number for size, from 1, got 0"),
    "missing": (({"x": [[1], None]}, "x", [4], 2), "column 'x': .*missing, the first in row 1"),
    "taken": (({**LONG, "length": [1, 2]}, "x", [4], 2), "column 'length': expected no column of this name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_sequences_are_refused(name: str) -> None:
    arguments, says = REFUSED[name]
    with pytest.raises(dflow.InputError, match=says):
        list(bucket_by_sequence_length(*arguments))
