"""Exports for arguments of any size: lookups in tables of several tasks, from an empty batch to a large one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.testing import memory_cluster
from dflow.tracing.errors import SignatureError
from tests.dflow.serving.inference_client import infer, json_request
from tests.dflow.serving.small_exports import served
from tests.effort import examples

#: A loaded function compiles for each size.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.RetraceWarning")

ROWS, DIM = 30, 3
#: Ids of the vocabulary that have a row, and one that has none.
POOL = np.array([*range(2**40, 2**40 + 12), 7], np.int64)
FORMS = (None, "int8", "bfloat16")


def stored(form: str | None, rows: Any) -> Any:
    """Return rows as an export with weights of this form has them."""
    if form == "int8":
        scale = np.abs(rows).max(-1, keepdims=True) / np.float32(127)
        return np.rint(rows / scale) * scale
    return rows.astype(ml_dtypes.bfloat16).astype(np.float32) if form else rows


class Tables:
    """Tables on the tasks of a cluster, a function that looks up in them, and the trainer's rows."""

    def __init__(self) -> None:
        self.blocks = dflow.Embedding(ROWS, DIM, name="blocks", shards=3)
        self.modulo = dflow.Embedding(ROWS, DIM, name="modulo", shards=2, by="modulo")
        self.words = dflow.Embedding(64, DIM, name="words", shards=2, vocabulary=dflow.Vocabulary(bucket=8))
        optimizer = dflow.Optimizer(optax.adagrad(0.1), [self.words], name="adagrad")

        @dflow.jit
        def step(ids: Any) -> None:
            found = self.words.find(ids)

            def loss() -> Any:
                return jnp.sum(self.words(found) ** 2)

            optimizer.apply(dflow.grad(loss, [self.words])(), found=found)

        step(dflow.wide_ids(POOL[:-1]))
        self.rows = {"blocks": np.asarray(self.blocks.read()), "modulo": np.asarray(self.modulo.read())}
        self.rows["words"] = np.asarray(self.words(POOL))

    def __call__(self, ids: Any, high: Any, low: Any, segments: Any, bagged: Any) -> Any:
        words = dflow.WideIds(high, low)
        return {
            "blocks": self.blocks(ids),
            "modulo": self.modulo.bag(ids, combine="mean"),
            "words": self.words(words),
            "bags": self.words.bag(words),
            "ragged": self.blocks.bag(bagged, segments=segments, bags=ids.shape[0]),
        }

    def export(self, form: Any) -> dflow.Exported:
        ids, half, many = (dflow.spec(*one) for one in (("b, n", jnp.int32), ("b, n", jnp.uint32), ("k", jnp.int32)))
        return dflow.export(self.__call__, ids, half, half, many, many, platforms=["cpu"], weights=form)

    def expected(self, form: str | None, ids: Any, words: Any, segments: Any, bagged: Any) -> Any:
        rows = {name: stored(form, rows) for name, rows in self.rows.items()}
        ragged = np.zeros((len(ids), DIM), np.float32)
        np.add.at(ragged, segments, rows["blocks"][bagged])
        return {
            "blocks": rows["blocks"][ids],
            "modulo": rows["modulo"][ids].sum(1) / max(1, ids.shape[1]),
            "words": rows["words"][words],
            "bags": rows["words"][words].sum(1),
            "ragged": ragged,
        }


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tables, dict[Any, dflow.Loaded]]]:
    """The tables, and what was exported from the connected cluster and loaded, by form of the weights."""
    folder = tmp_path_factory.mktemp("exports")
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            made = Tables()
        for form in FORMS:
            made.export(form).save(folder / str(form))
        yield made, {form: dflow.load(folder / str(form), prefix=f"{form}/") for form in FORMS}


@given(st.data(), st.sampled_from(FORMS), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=examples(12), deadline=None)
def test_lookups_of_any_size_answer_as_the_trainer(
    tables: tuple[Tables, dict[Any, dflow.Loaded]], data: Any, form: str | None, b: int, n: int, k: int
) -> None:
    made, loaded = tables
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = k if b else 0
    ids, words = random.integers(0, ROWS, (b, n), np.int32), random.integers(0, len(POOL), (b, n))
    segments, bagged = random.integers(0, max(1, b), count, np.int32), random.integers(0, ROWS, count, np.int32)
    wide = dflow.wide_ids(POOL[words])
    found = loaded[form](ids, wide.high, wide.low, segments, bagged)
    for name, expected in made.expected(form, ids, words, segments, bagged).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_segment_outside_of_an_open_number_of_bags_is_refused(
    tables: tuple[Tables, dict[Any, dflow.Loaded]],
) -> None:
    none = np.zeros((2, 0), np.uint32)
    with pytest.raises(dflow.InputError, match=r"table 'blocks': expected segments from 0 to 1, got 2\n"):
        tables[1][None](none.astype(np.int32), none, none, np.array([0, 2], np.int32), np.array([1, 1], np.int32))


def test_a_number_of_bags_that_no_argument_has_is_refused() -> None:
    held, ids = dflow.Embedding(ROWS, DIM, name="held"), dflow.spec("b", jnp.int32)
    with pytest.raises(dflow.ExportError, match=r"expected a number of segments of held that is fixed.* got 2\*b\n"):
        dflow.export(lambda ids: held.bag(ids, segments=ids, bags=2 * ids.shape[0]), ids, platforms=["cpu"])


def longest(x: Any) -> Any:
    return x / x.max(0)


@pytest.mark.parametrize(("fn", "rows"), [(lambda x: x * 2, (0, 3)), (longest, None)])
def test_an_empty_batch_is_answered_unless_an_op_needs_a_row(
    fn: Callable[[Any], Any], rows: Any, tmp_path: Path
) -> None:
    exported = dflow.export(fn, dflow.spec("b, 3", jnp.float32), platforms=["cpu"])
    assert "(x: f32[b,3]) -> f32[b,3]" in str(exported)
    loaded = dflow.load(exported.save(tmp_path / "m"))
    assert loaded(np.ones((2, 3), np.float32)).shape == (2, 3)
    if rows is not None:
        assert loaded(np.ones((0, 3), np.float32)).shape == rows
        return
    wanted = r"with the size 0 for b, and an op of it needs 1 or more\n  at .*test_open_sizes\.py:\d+\n"
    with pytest.raises(SignatureError, match=wanted):
        loaded(np.ones((0, 3), np.float32))


@pytest.mark.once
def test_the_server_answers_batches_of_no_rows_and_of_many(tmp_path: Path) -> None:
    held = dflow.Embedding(ROWS, DIM, name="held", shards=3)
    dflow.export(held, dflow.spec("b", jnp.int32), platforms=["cpu"]).save(tmp_path / "m")
    with served(tmp_path / "m") as server:
        for count in (0, 7, 100_000):
            ids = np.arange(count, dtype=np.int32) % ROWS
            status, answer, _ = infer(server.url, "m", json_request(ids=ids))
            assert status == 200, answer
            data = np.reshape(answer["outputs"][0]["data"], answer["outputs"][0]["shape"])
            np.testing.assert_allclose(data, held.read()[ids], rtol=1e-6)
