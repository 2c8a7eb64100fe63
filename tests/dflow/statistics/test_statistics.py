"""`dflow.data.statistics`: against NumPy for any division into parts, on a cluster, and in models."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dflow
from dflow.data import Normalization, StringLookup, batches, numpy_batches, statistics
from dflow.distributed.coordinator.decisions import Decisions
from dflow.statistics import data_statistics
from dflow.statistics.column_statistics import ColumnStatistics, decoded, encoded
from dflow.testing import memory_cluster
from tests.effort import examples

pytestmark = pytest.mark.once

NUMBERS = st.sampled_from(["f8", "f4", "i8", "i2", "u1", "?"])


@given(st.data(), NUMBERS, st.integers(1, 60), st.sampled_from([(), (2,)]))
@settings(max_examples=examples(80), deadline=None)
def test_parts_in_any_division_are_the_whole(data: Any, dtype: str, count: int, shape: tuple[int, ...]) -> None:
    floats = st.floats(-1e6, 1e6, width=32) | st.just(np.nan)
    values = data.draw(hnp.arrays(dtype, (count, *shape), elements=floats if dtype[0] == "f" else None))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=4)))
    found = statistics([{"x": part} for part in np.split(values, cuts)])["x"]
    there = ~np.isnan(values)
    assert np.array_equal(found.count, there.sum(axis=0))
    assert np.array_equal(found.missing, count - there.sum(axis=0))
    if there.all():
        exact = values.astype(np.longdouble)
        scale = max(1.0, float(np.abs(exact).max()))
        np.testing.assert_allclose(found.mean, exact.mean(axis=0).astype(float), rtol=1e-12, atol=1e-12 * scale)
        np.testing.assert_allclose(found.deviation, exact.std(axis=0).astype(float), rtol=1e-9, atol=1e-9 * scale)
        assert np.array_equal(found.minimum, values.min(axis=0))
        assert np.array_equal(found.maximum, values.max(axis=0))
        shares = [0.0, 0.3, 1.0]
        assert np.array_equal(found.quantile(shares), np.quantile(values.astype(float), shares, axis=0))


def test_a_mean_far_from_zero_keeps_its_deviation() -> None:
    values = 1e9 + np.random.default_rng(0).normal(size=100_000)
    found = statistics({"x": values})["x"]
    assert abs(found.deviation / values.std() - 1) < 1e-9


@given(st.lists(st.sampled_from("abcdefgh"), max_size=80), st.integers(1, 5), st.integers(1, 5))
@settings(max_examples=examples(40), deadline=None)
def test_counts_are_exact_up_to_the_limit_and_bounded_beyond(words: list[str], distinct: int, size: int) -> None:
    parts = [{"x": np.array([*words[at : at + size], None], object)[:-1]} for at in range(0, len(words), size)]
    if not words:
        return
    found = statistics(parts, distinct=distinct)["x"]
    true = {word: words.count(word) for word in words}
    assert len(found.counts) <= distinct
    assert found.count_error <= len(words) / distinct
    for word, count in true.items():
        assert count - found.count_error <= found.counts.get(word, 0) <= count
    exact = statistics(parts)["x"]
    assert dict(exact.counts) == true
    assert exact.vocabulary() == sorted(true, key=lambda word: (-true[word], word))
    assert exact.vocabulary(2, at_least=2) == [word for word in exact.vocabulary()[:2] if true[word] > 1]


def test_a_sample_is_that_of_any_division(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_statistics, "_PIECE", 8192)
    values = np.random.default_rng(0).permutation(50_000) / 50_000
    found = statistics({"x": values}, sample=1000)["x"]
    assert not found.is_exact
    assert len(found.values) == 1000
    assert abs(found.quantile(0.5) - 0.5) < 5 * 0.5 / 1000**0.5
    parts = [ColumnStatistics(sample=1000) for _ in range(3)]
    for number in range(7):
        part, places = values[number * 8192 : (number + 1) * 8192], np.random.default_rng((number, 0))
        parts[number % 3].add(part, np.zeros(len(part), bool), places.random(len(part)))
    whole = ColumnStatistics(sample=1000)
    for part in parts:
        whole.merge(decoded(encoded({"x": part}))["x"])
    whole.finish()
    assert np.array_equal(np.sort(whole.values), np.sort(found.values))


def frame() -> Any:
    pd = pytest.importorskip("pandas")
    count = 20_000
    draw = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": pd.array([None if row % 7 == 0 else 18 + row % 60 for row in range(count)], "Int64"),
            "city": [("Oslo", "Lima", None)[row % 3] for row in range(count)],
            "kind": pd.Categorical([("a", "b", "b", None)[row % 4] for row in range(count)]),
            "price": np.where(draw.random(count) < 0.1, np.nan, draw.normal(size=count)),
            "at": pd.date_range("2020-01-01", periods=count, freq="h", tz="Europe/Oslo"),
        }
    )


def test_a_frame_with_missing_values() -> None:
    table = frame()
    found = statistics(table, vocabularies=["age"])
    assert {name: int(column.missing) for name, column in found.items()} == table.isna().sum().to_dict()
    for name in ("age", "price"):
        assert abs(found[name].mean - table[name].mean()) < 1e-9
        assert abs(found[name].deviation - table[name].std(ddof=0)) < 1e-9
        assert abs(found[name].quantile(0.25) - table[name].astype(float).quantile(0.25)) < 1e-9
    assert found["city"].vocabulary() == ["Lima", "Oslo"]
    assert found["kind"].vocabulary(1) == ["b"]
    assert found["age"].counts == table["age"].value_counts().to_dict()
    assert found["at"].minimum == np.datetime64("2019-12-31T23:00")
    assert found["at"].mean is None
    assert "missing 2858" in repr(found)
    # What `batches` fills counts as values; what it pads does not count.
    of_batches = statistics(
        batches(table, 512, shuffle=True, epochs=None, pad=True, missing={"age": 0, "city": "?", "kind": "?"})
    )
    assert (of_batches["age"].missing, of_batches["age"].rows) == (0, len(table))
    assert of_batches["kind"].vocabulary() == ["b", "?", "a"]
    empty = statistics(table[:0])
    assert (empty["age"].count, empty["age"].mean, empty["city"].vocabulary()) == (0, None, [])


def test_files_are_measured_by_their_rows(tmp_path: Any) -> None:
    pytest.importorskip("pyarrow")
    table = frame().drop(columns=["at", "kind"])
    table.to_parquet(tmp_path / "rows.parquet", row_group_size=3000)
    rows = dflow.data.read(tmp_path, missing={"age": 0, "city": "?"})
    of_batches = batches(rows, 512, shuffle=1000, epochs=None, pad=True)
    with memory_cluster() as memory:
        worker = memory.worker()
        shared = statistics(rows, cluster=worker, name="files")
        # A job that goes on from a snapshot has the parts of before, and decides again.
        memory.coordinator._state.core.part(Decisions)._values.clear()
        with pytest.raises(dflow.InputError, match="statistics 'files': expected a new name for each call"):
            statistics(rows, cluster=worker, name="files")
        again = statistics(rows, cluster=memory.worker(1), name="files")
    for found in (statistics(rows), statistics(of_batches), shared, again):
        assert found["age"].rows == len(table)
        assert found["price"].missing == table["price"].isna().sum()
        assert abs(found["age"].mean - table["age"].fillna(0).mean()) < 1e-9
        assert found["city"].counts == table["city"].fillna("?").value_counts().to_dict()


@pytest.mark.parametrize("loader", [iter, lambda batches: {1: batches[0], 2: batches[1]}.values()])
def test_batches_of_a_loader_are_measured_one_after_another(loader: Any) -> None:
    found = statistics(numpy_batches(loader([{"x": np.arange(3)}, {"x": np.arange(3, 5)}])))
    assert (found["x"].count, found["x"].mean) == (5, 2)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown": ({"x": [1]}, {"vocabularies": ["y"]}, "vocabularies: expected names of columns, got 'y'"),
    "complex": ({"x": np.ones(2, complex)}, {}, "column 'x': expected real numbers, got complex128"),
    "columns": ([{"x": np.ones(1)}, {"y": np.ones(1)}], {}, r"batches of the same columns, got \['x'\] and \['y'\]"),
    "kinds": ([{"x": np.ones(1)}, {"x": ["a"]}], {}, "column 'x': expected numbers in each batch, got strings"),
    "objects": ({"x": [object()]}, {}, "column 'x': .* got object"),
    "elements": ([1, 2], {}, "expected batches of arrays, got a int"),
    "name": ({"x": [1]}, {"name": "x"}, "expected cluster= and name= together, got name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_data_is_refused(name: str) -> None:
    data, options, says = REFUSED[name]
    with pytest.raises(dflow.InputError, match=says):
        statistics(data, **options)
    found = statistics({"x": [1, 2], "s": ["a", "b"]})
    with pytest.raises(dflow.InputError, match="whose values were counted, got one of numbers"):
        found["x"].vocabulary()
    with pytest.raises(dflow.InputError, match="expected a column of numbers with values, got one of strings"):
        found["s"].quantile(0.5)
    with pytest.raises(KeyError, match="did you mean"):
        found["xx"]


def test_workers_share_the_rows_and_get_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_statistics, "_PIECE", 4096)
    table = frame()
    alone = statistics(table, vocabularies=["age"])
    with memory_cluster(ps=1, workers=2) as memory:
        workers = [memory.worker(index) for index in range(2)]

        def measure(worker: Any) -> Any:
            return statistics(table, vocabularies=["age"], cluster=worker, name="clicks")

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(measure, workers))
        results.append(measure(memory.worker(2)))  # as one that was restarted
    for found in results:
        for name, column in found.items():
            assert (column.count, column.counts) == (alone[name].count, alone[name].counts)
            if column.mean is not None:
                assert (column.minimum, column.maximum) == (alone[name].minimum, alone[name].maximum)
                np.testing.assert_allclose(
                    [column.mean, column.deviation], [alone[name].mean, alone[name].deviation], rtol=1e-12
                )
                assert np.array_equal(np.sort(column.values), np.sort(alone[name].values))


def test_a_worker_that_fails_leaves_its_parts_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_statistics, "_PIECE", 100)
    values, has_begun, has_failed = np.arange(1000.0), threading.Event(), threading.Event()

    class Failing:
        shape, dtype = values.shape, values.dtype

        def __len__(self) -> int:
            return len(values)

        def __getitem__(self, rows: Any) -> Any:
            has_begun.set()
            raise OSError("the disk is gone")

    with memory_cluster(ps=1, workers=2) as memory, ThreadPoolExecutor(1) as pool:
        workers = [memory.worker(index) for index in range(2)]

        def fail() -> None:
            try:
                statistics({"x": Failing()}, cluster=workers[0], name="failing")
            finally:
                has_failed.set()

        failing = pool.submit(fail)
        assert has_begun.wait(60)
        assert has_failed.wait(60)
        found = statistics({"x": values}, cluster=workers[1], name="failing")["x"]
        with pytest.raises(OSError, match="the disk is gone"):
            failing.result(60)
    assert (found.count, found.minimum, found.maximum) == (1000, 0, 999)
    np.testing.assert_allclose([found.mean, found.deviation], [values.mean(), values.std()], rtol=1e-12)


def test_layers_of_statistics_are_saved_and_exported(tmp_path: Any) -> None:
    found = statistics({"x": np.array([1.0, 2.0, 3.0]), "w": np.ones(3), "city": ["Oslo", "Lima", "Oslo"]})
    scale, same = Normalization(found["x"], name="scale"), Normalization(found["w"], name="same")
    lookup = StringLookup(found["city"].vocabulary(), name="city")
    assert (len(lookup), lookup(["Lima", "Oslo", "Rome"]).tolist()) == (3, [2, 1, 0])

    def model(x: Any, city: Any) -> Any:
        return {"x": scale(x), "same": same(x * 0 + 1), "city": lookup(city)}

    path = tmp_path / "model"
    dflow.export(model, dflow.spec("b", jnp.float32), dflow.spec("b", np.str_)).save(path)
    result = dflow.load(path, prefix="loaded/").model(np.array([2.0, 3.0], np.float32), ["Rome", "Lima"])
    np.testing.assert_allclose(result["x"], [0, 1.2247449], rtol=1e-6)
    assert (result["same"].tolist(), result["city"].tolist()) == ([0, 0], [0, 2])
    with pytest.raises(dflow.InputError, match="'n': expected statistics of numbers, got those of strings"):
        Normalization(found["city"], name="n")
    with pytest.raises(dflow.InputError, match="expected each name once, got 'a' and 'a'"):
        StringLookup(["a", "a"], name="twice")
    with pytest.raises(dflow.InputError, match="expected names, got none"):
        StringLookup([], name="none")


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True))
@settings(max_examples=examples(15), deadline=None)
def test_a_lookup_finds_each_of_its_names_and_no_other(ids: list[int]) -> None:
    lookup = StringLookup(ids, name="any")
    assert jax.device_get(lookup(np.array(ids))).tolist() == list(range(1, len(ids) + 1))
    others = np.array([id ^ 1 for id in ids if id ^ 1 not in ids], np.int64)
    assert not np.any(lookup(others)) if len(others) else True
