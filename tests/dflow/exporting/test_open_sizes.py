"""Exported lookups: batches of any size, tables of several tasks, and an error for an id outside of the table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.serving.served_version import ServingSettings
from dflow.testing import memory_cluster
from dflow.tracing.errors import SignatureError
from tests.dflow.serving.inference_client import infer, json_request
from tests.dflow.serving.small_exports import served
from tests.effort import examples

pytestmark = [
    pytest.mark.filterwarnings("ignore::dflow.RetraceWarning"),
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
]

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


@pytest.mark.once
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


def test_integers_of_64_bits_are_no_numbers_in_an_export() -> None:
    with pytest.raises(dflow.InputError, match=r"'ids'.*\n.*\n.* of 32 bits, dflow.spec\(shape, numpy.int32\)"):
        dflow.export(lambda ids: ids + 1, dflow.spec("b", np.int64))


@pytest.mark.once
def test_a_segment_outside_of_an_open_number_of_bags_is_refused(tables: tuple[Tables, dict[Any, dflow.Loaded]]) -> None:
    none = np.zeros((2, 0), np.uint32)
    with pytest.raises(dflow.InputError, match=r"table 'blocks': expected segments from 0 to 1, got 2\n"):
        tables[1][None](none.astype(np.int32), none, none, np.array([0, 2], np.int32), np.array([1, 1], np.int32))


def test_a_number_of_bags_that_no_argument_has_is_refused() -> None:
    held, ids = dflow.Embedding(ROWS, DIM, name="held"), dflow.spec("b", jnp.int32)
    with pytest.raises(dflow.ExportError, match=r"expected a number of segments of held that is fixed.* got 2\*b\n"):
        dflow.export(lambda ids: held.bag(ids, segments=ids, bags=2 * ids.shape[0]), ids, platforms=["cpu"])


def longest(x: Any) -> Any:
    return x / x.max(0)


def test_an_op_that_needs_a_row_leaves_the_other_letters_from_0(tmp_path: Path) -> None:
    shapes = [dflow.spec(shape, jnp.float32) for shape in ("b, n", "n, 3", "k")]
    exported = dflow.export(lambda x, y, z: (x @ longest(y), z * 2), *shapes, platforms=["cpu"])
    assert "(x: f32[b,n], y: f32[n,3], z: f32[k]) -> (f32[b,3], f32[k])" in str(exported)
    loaded = dflow.load(exported.save(tmp_path / "m"))
    ones = partial(np.ones, dtype=np.float32)
    for b, k in ((0, 0), (2, 0), (0, 2)):
        x, z = loaded(ones((b, 4)), ones((4, 3)), ones(k))
        assert (x.shape, z.shape) == ((b, 3), (k,))
    text = r"with the size 0 for {}, and an op of it needs 1 or more\n  at .*test_open_sizes\.py:\d+\n"
    with pytest.raises(SignatureError, match=text.format("n")):
        loaded(ones((2, 0)), ones((0, 3)), ones(2))
    alone = dflow.load(dflow.export(longest, dflow.spec("b, 3", jnp.float32), platforms=["cpu"]).save(tmp_path / "n"))
    with pytest.raises(SignatureError, match=text.format("b")):
        alone(ones((0, 3)))


IDS = dflow.spec("b", jnp.int32)
FIXED = jnp.zeros(3, jnp.int32)


def table(name: str, **division: Any) -> dflow.Embedding:
    return dflow.Embedding(10, 2, name=name, **division)


def doubled(t: Any) -> Any:
    """A function with a custom derivative rule."""

    @jax.custom_jvp
    def double(ids: Any, factor: Any) -> Any:
        return t(ids) * factor

    double.defjvp(lambda primals, tangents: (double(*primals), double(*primals) * tangents[1]))
    return lambda ids: double(ids, 2.0)


def scanned(t: Any, ids: Any) -> Any:
    return jax.lax.scan(lambda total, id: (total + t(id).sum(), t(id)), 0.0, ids)


def looped(t: Any, ids: Any) -> Any:
    def is_on(carry: Any) -> Any:
        return (carry[0] < 3) & (t(ids[carry[0]]).sum() < jnp.inf)

    return jax.lax.while_loop(is_on, lambda carry: (carry[0] + 1, carry[1] + 1.0), (0, 0.0))


USES: dict[str, tuple[Callable[..., Any], Callable[[Any, Any], Any], Any]] = {
    "lookup": (table, lambda t, ids: t(ids), IDS),
    "shards": (partial(table, shards=3), lambda t, ids: t(ids), IDS),
    "columns": (partial(table, shards=2, by="columns"), lambda t, ids: t(ids), IDS),
    "bag": (partial(table, shards=3), lambda t, ids: t.bag(ids[None], combine="mean"), IDS),
    "vmap": (table, lambda t, ids: jax.vmap(t)(ids), IDS),
    "scan": (partial(table, shards=3), scanned, FIXED),
    "while_loop": (table, looped, FIXED),
    "cond": (table, lambda t, ids: jax.lax.cond(ids[0] == 1, lambda: t(ids).sum(), lambda: 0.0), FIXED),
    "custom_jvp": (table, lambda t, ids: doubled(t)(ids), FIXED),
    "gradient": (table, lambda t, ids: dflow.grad(lambda: jnp.sum(t(ids) ** 2), [t])()[0].read(), FIXED),
    "loss": (partial(table, shards=2), lambda t, ids: dflow.softmax_cross_entropy(t, jnp.ones((3, 2)), ids), FIXED),
}


@pytest.fixture(scope="module")
def uses() -> dict[str, Callable[..., Any]]:
    """The functions over tables."""
    return {use: partial(fn, make(f"{use}_words")) for use, (make, fn, _) in USES.items()}


@pytest.fixture(scope="module")
def loaded(uses: dict[str, Callable[..., Any]], tmp_path_factory: pytest.TempPathFactory) -> dflow.Loaded:
    folder = tmp_path_factory.mktemp("ids") / "m"
    exported = {use: (lambda ids, fn=fn: fn(ids), USES[use][2]) for use, fn in uses.items()}
    dflow.export(exported, platforms=["cpu"]).save(folder)
    return dflow.load(folder, prefix="loaded/", tables=dflow.connect())


@pytest.mark.once
@pytest.mark.parametrize("use", USES)
def test_an_id_outside_is_refused_by_its_number(
    use: str, uses: dict[str, Callable[..., Any]], loaded: dflow.Loaded
) -> None:
    good = np.array([1, 0, 9], np.int32)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), loaded[use](good), dflow.jit(uses[use])(good)
    )
    for outside in (10, -1, 2**31 - 1, -(2**31)):
        with pytest.raises(dflow.InputError, match=rf"_words': expected ids from 0 to 9, got {outside}\n"):
            loaded[use](np.array([1, outside, 3], np.int32))


@pytest.mark.once
def test_an_id_outside_is_refused_in_a_loop_around_the_loaded_function(loaded: dflow.Loaded) -> None:
    with pytest.raises(dflow.InputError, match="expected ids from 0 to 9, got 10"):
        dflow.jit(lambda ids: jax.lax.map(loaded["scan"], ids))(np.array([[1, 2, 3], [1, 10, 3]], np.int32))


def test_a_segment_outside_of_the_bags_is_refused(tmp_path: Path) -> None:
    held = table("ids", shards=2)
    dflow.export(lambda ids, bag: held.bag(ids, segments=bag, bags=2), IDS, IDS, platforms=["cpu"]).save(tmp_path / "m")
    loaded = dflow.load(tmp_path / "m", prefix="loaded/")
    ids = np.array([1, 9], np.int32)
    np.testing.assert_allclose(loaded(ids, np.array([1, 0], np.int32)), held.read()[ids[::-1]], rtol=1e-6)
    for outside in (2, -1):
        with pytest.raises(dflow.InputError, match=rf"table 'ids': expected segments from 0 to 1, got {outside}\n"):
            loaded(ids, np.array([1, outside], np.int32))


def test_a_training_step_changes_nothing_when_it_is_refused(tmp_path: Path) -> None:
    held, other = table("words", shards=2), dflow.Embedding(5, 2, name="others")
    optimizer = dflow.Optimizer(optax.adam(0.1), [held, other], name="adam")

    def step(ids: Any, others: Any) -> Any:
        loss, gradients = dflow.value_and_grad(lambda: jnp.sum((held(ids) * other(others)) ** 2), [held, other])()
        optimizer.apply(gradients)
        return loss

    dflow.export(step, IDS, IDS, platforms=["cpu"]).save(tmp_path / "m")
    model = dflow.load(tmp_path / "m", prefix="loaded/")
    ids = np.array([1, 7], np.int32)
    for _ in range(2):
        np.testing.assert_allclose(model(ids, ids % 5), dflow.jit(step)(ids, ids % 5), rtol=1e-6)
    before = {name: np.asarray(held.read()) for name, held in model.variables.items()}
    for bad, says in (((ids, ids), "table 'others': expected ids from 0 to 4, got 7"), ((ids + 9, ids % 5), "'words'")):
        with pytest.raises(dflow.InputError, match=says):
            model(*bad)
    for name, value in before.items():
        np.testing.assert_array_equal(model.variables[name].read(), value)


def test_a_consumer_without_dflow_gets_the_id_beside_the_results(tmp_path: Path) -> None:
    held = table("words")
    dflow.export(held, IDS, platforms=["cpu"]).save(tmp_path / "m")
    program = jax.export.deserialize(bytearray((tmp_path / "m" / "programs" / "call").read_bytes()))
    rows, _, outside = program.call({"words/0": held.read()}, {}, np.array([1, 12], np.int32))
    assert np.isnan(rows).tolist() == [[False] * 2, [True] * 2]
    assert {name: int(id) for name, id in outside.items()} == {"words (ids of int32 below 10)": 12}


@pytest.mark.once
def test_the_server_refuses_the_request_and_names_its_input(tmp_path: Path) -> None:
    users, items = table("users", shards=2), dflow.Embedding(100, 2, name="items")

    def score(user: Any, item: Any) -> Any:
        return (users(user) * items(item)).sum(-1)

    dflow.export(score, IDS, IDS, platforms=["cpu"]).save(tmp_path / "m")
    with served(tmp_path / "m", ServingSettings(max_batch=4)) as server:
        assert not [line for line in server.lines if "one by one" in line]  # type: ignore[attr-defined]

        def ask(user: int, item: int) -> tuple[int, Any]:
            status, answer, _ = infer(server.url, "m", json_request(user=np.int32([user]), item=np.int32([item])))
            return status, answer.get("error")

        assert ask(1, 30) == (200, None)
        assert ask(1, 300) == (400, "input 'item': table 'items': expected ids from 0 to 99, got 300")
        assert ask(-3, 30) == (400, "input 'user': table 'users': expected ids from 0 to 9, got -3")


def test_a_warning_that_is_an_error_is_raised_by_the_export() -> None:
    warned: list[Any] = []

    def warns_once(x: Any) -> Any:
        if not warned:
            warned.append(x.shape)
            warnings.warn("warned once", stacklevel=1)
        return x

    with pytest.raises(UserWarning, match="warned once"):
        dflow.export(warns_once, dflow.spec("b", jnp.float32))
