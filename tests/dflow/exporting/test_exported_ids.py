"""Exported lookups: an id outside of the table is an error that names it, wherever the function looks it up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.serving.served_version import ServingSettings
from tests.dflow.serving.inference_client import infer, json_request
from tests.dflow.serving.small_exports import served

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

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
    return dflow.load(folder, prefix="loaded/")


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
