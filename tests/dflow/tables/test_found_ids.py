"""The arrays of found ids belong together: slicing them is an error. Also files of tables with a vocabulary."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import dflow
from dflow.tracing.state.resources import is_variable

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

IDS = dflow.wide_ids(np.arange(6).reshape(3, 2) + 2**40)


def table(name: str = "words") -> tuple[dflow.Embedding, dflow.Optimizer]:
    made = dflow.Embedding(64, 2, name=name, vocabulary=dflow.Vocabulary(bucket=8), shards=2)
    return made, dflow.Optimizer(optax.adagrad(0.1), [made], name=f"{name}_adagrad")


def trained(held: dflow.Embedding, optimizer: dflow.Optimizer) -> Callable[..., Any]:
    def step(ids: Any) -> Any:
        found = held.find(ids)
        loss, gradients = dflow.value_and_grad(lambda: jnp.sum(held(found) ** 2), [held])()
        optimizer.apply(gradients, found=found)
        return loss

    return step


def stacked(held: Any, ids: Any) -> Any:
    found = jax.lax.scan(lambda none, one: (none, held.find(one)), None, ids)[1]
    return held(found)


CUT: dict[str, Callable[[Any, Any], Any]] = {
    "scan": lambda held, ids: jax.lax.scan(lambda c, one: (c, held(one)), 0, held.find(ids)),
    "map in a dict": lambda held, ids: jax.lax.map(lambda one: held(one["ids"]), {"ids": held.find(ids)}),
    "vmap": lambda held, ids: jax.vmap(held)(held.find(ids)),
    "stacked": stacked,
    "jax.tree.map": lambda held, ids: held(jax.tree.map(lambda part: part[None], held.find(ids))),
}


@pytest.mark.parametrize("way", CUT)
def test_found_ids_that_are_taken_apart_are_refused(way: str) -> None:
    held, _ = table()
    with pytest.raises(
        dflow.InputError, match=r"(?s)ids found in table 'words': expected the result of one find as it"
    ) as e:
        dflow.jit(lambda ids: CUT[way](held, ids))(IDS)
    assert "test_found_ids.py" in str(e.value).splitlines()[1]


def test_found_ids_may_be_carried_branched_over_and_kept_whole() -> None:
    held, _ = table()

    @dflow.jit
    def rows(ids: Any) -> Any:
        found = jax.lax.cond(True, lambda: held.find(ids), lambda: held.find(ids))
        carried = jax.lax.scan(lambda c, k: (c, held(c)[k]), found, jnp.arange(3))[1]
        mapped = jax.vmap(lambda one, k: held(one)[k], in_axes=(None, 0))(found, jnp.arange(3))
        again = jax.lax.map(lambda one: held(held.find(one)), ids)  # the remedy
        return carried, mapped, jax.checkpoint(held)(found), again

    for each in rows(IDS):
        np.testing.assert_array_equal(each, held(IDS))


def test_a_step_that_trains_a_vocabulary_is_exported(tmp_path: Path) -> None:
    held, optimizer = table()
    step, any_bits = trained(held, optimizer), dflow.spec("b, 2", jnp.uint32)
    functions = {
        "train": (lambda high, low: step(dflow.WideIds(high, low)), any_bits, any_bits),
        "look": (lambda high, low: held(dflow.WideIds(high, low)), any_bits, any_bits),
    }
    dflow.export(functions, platforms=["cpu"]).save(tmp_path / "m")
    model, here = dflow.load(tmp_path / "m", prefix="loaded/"), dflow.jit(step)
    for _ in range(3):
        np.testing.assert_allclose(model.train(IDS.high, IDS.low), here(IDS), rtol=1e-6)
    for count in (1, 3):
        given = dflow.WideIds(IDS.high[:count], IDS.low[:count])
        np.testing.assert_allclose(model.look(given.high, given.low), held(given), rtol=1e-6)


@pytest.mark.once
def test_an_exported_step_trains_batches_of_any_size_as_the_step_itself(tmp_path: Path) -> None:
    vocabulary = dflow.Vocabulary(bucket=4, admit_after=2)
    held = dflow.Embedding(24, 2, name="names", shards=2, vocabulary=vocabulary)
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [held], name="adagrad")

    def step(ids: Any, wanted: Any) -> Any:
        found = held.find(ids)
        value, gradients = dflow.value_and_grad(lambda: jnp.sum((held(found).sum(-1) - wanted) ** 2), [held])()
        optimizer.apply(gradients, found=found)
        return value

    dflow.export(step, dflow.spec("b", np.str_), dflow.spec("b", jnp.float32), platforms=["cpu"]).save(tmp_path / "m")
    loaded, here, draw = dflow.load(tmp_path / "m", prefix="loaded/"), dflow.jit(step), np.random.default_rng(0)
    for count in (3, 20, 3, 20):
        batch = draw.integers(0, 30, count).astype(str), draw.random(count, np.float32)
        np.testing.assert_allclose(loaded(*batch), here(*batch), rtol=1e-5)
    with pytest.raises(dflow.ExportError, match="with the size 0 for b, and an op of it needs 1 or more"):
        loaded(np.zeros(0, str), np.zeros(0, np.float32))
    beside = [one for shard in held.shards for one in (shard.hooks.ledger, *shard.hooks.saved.values())]
    slots = jax.tree_util.tree_leaves(optimizer.slots, is_leaf=is_variable)
    mine = {one.name: one for one in (*held.shards, *beside, *slots)}
    for name, variable in loaded.variables.items():
        np.testing.assert_allclose(variable.read(), mine[name.removeprefix("loaded/")].read(), rtol=1e-5, atol=1e-7)


def test_a_vocabulary_goes_through_orbax_by_its_own_names(tmp_path: Path) -> None:
    held, optimizer = table("model/words")
    step = dflow.jit(trained(held, optimizer))
    step(IDS)
    state, rows = [held, optimizer], np.asarray(held(IDS))
    dflow.save(tmp_path / "s.orbax", state)
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "s.orbax")
        checkpointer.save(tmp_path / "again", tree)
    assert sorted(key for key in tree["model"] if "adagrad" not in key) == [
        "words",
        "words.born",
        "words.ids",
        "words.seen",
    ]
    for name in ("s.orbax", "again"):
        step(IDS)
        assert not dflow.restore(tmp_path / name, state).missing
        np.testing.assert_array_equal(held(IDS), rows)


def test_found_ids_keep_no_table_alive() -> None:
    def used() -> tuple[weakref.ref[Any], Any]:
        made = dflow.Embedding(8, 2, name="short-lived", vocabulary=dflow.Vocabulary(bucket=8))
        dflow.jit(lambda ids: jax.jit(made)(made.find(ids)))(IDS)
        return weakref.ref(made.shards[0]), jax.tree.structure(made.find(IDS))

    shard, tree = used()
    gc.collect()
    assert shard() is None
    with pytest.raises(dflow.VariableError, match="found ids of a table in use, got those of one that is gone"):
        jax.tree.unflatten(tree, [1] * tree.num_leaves)
