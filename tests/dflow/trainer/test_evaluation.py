"""`dflow.evaluate` in one process: means over examples, of the values of one moment; what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow

X = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)


def test_an_uneven_last_batch_counts_by_its_examples() -> None:
    w = dflow.Variable(jnp.arange(3.0))

    @dflow.jit
    def step(x: Any) -> Any:
        errors = (x @ w) ** 2
        return {"loss": jnp.mean(errors), "each": errors, "large": errors > 1}

    found = dflow.evaluate(step, dflow.data.batches(X, 10))
    errors = (X @ np.arange(3.0)) ** 2
    assert found == {
        "loss": pytest.approx(errors.mean(), rel=1e-6),
        "each": pytest.approx(errors.mean(), rel=1e-6),
        "large": (errors > 1).mean(),
        "examples": 25,
    }


def test_a_step_may_count_its_examples_and_take_several_arguments() -> None:
    def step(x: Any, mask: Any) -> Any:
        return {"loss": jnp.sum(x * mask) / jnp.sum(mask), "examples": jnp.sum(mask)}

    batches = [(jnp.array([1.0, 2.0, 9.0]), jnp.array([1, 1, 0])), (jnp.array([6.0, 9.0, 9.0]), jnp.array([1, 0, 0]))]
    assert dflow.evaluate(step, batches) == {"loss": 3.0, "examples": 3.0}
    masked = jnp.full(3, 5.0), jnp.array([0, 0, 0])  # its mean is NaN, and counts nothing
    assert dflow.evaluate(step, [*batches, masked]) == {"loss": 3.0, "examples": 3.0}


def test_a_single_result_is_the_loss_and_batches_may_come_by_number_alone() -> None:
    class Squares:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            if number not in range(3):
                raise AssertionError(number)
            return np.full(2, number**2, np.float32)

    assert dflow.evaluate(jnp.mean, Squares()) == {"loss": pytest.approx(5 / 3), "examples": 6.0}


def test_training_between_the_batches_changes_nothing() -> None:
    w = dflow.Variable(jnp.ones(3))
    train = dflow.jit(lambda: w.assign_add(jnp.ones(3)))

    def batches() -> Iterator[Any]:
        for rows in np.split(X, 5):
            yield rows
            train()

    train()
    found = dflow.evaluate(lambda x: jnp.mean(x @ w), batches())
    assert found["loss"] == pytest.approx((X @ np.full(3, 2.0)).mean(), rel=1e-6)
    assert (w.read() == 7).all()
    assert dflow.evaluate(lambda x: jnp.mean(x @ w), [X])["loss"] == pytest.approx((X @ np.full(3, 7.0)).mean(), 1e-6)


def test_a_second_evaluation_traces_nothing() -> None:
    traces = []

    class Model:
        def __init__(self, scale: float) -> None:
            self.w = dflow.Variable(scale)

        def mean(self, x: Any) -> Any:
            traces.append(x.shape)
            return jnp.mean(x) * self.w

    one, other = Model(1.0), Model(2.0)
    losses = [dflow.evaluate(model.mean, dflow.data.batches(X, 10))["loss"] for model in (one, other, one, other)]
    assert traces == [(10, 3), (5, 3)] * 2
    assert losses == [pytest.approx(scale * X.mean(), rel=1e-5) for scale in (1, 2, 1, 2)]


def refused(step: Any, batches: Any, text: str) -> None:
    with pytest.raises(dflow.TrainingError, match=rf"(?s){text}.*test_evaluation.py:\d+\n  \w") as error:
        dflow.evaluate(step, batches)
    assert str(error.value).startswith("evaluate: ")


def test_what_an_evaluation_cannot_count_is_refused() -> None:
    count, queue = (
        dflow.Variable(0, name="count"),
        dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32), name="queue"),
    )
    key = dflow.Generator(0, name="noise")

    def by_size(x: Any) -> Any:
        return {"loss": jnp.mean(x)} if len(x) == 10 else {"error": jnp.mean(x)}

    def writes(x: Any) -> Any:
        count.assign_add(1)
        return jnp.mean(x)

    data = dflow.data.batches(X, 10)
    refused(writes, data, "only reads variables, got one that changes 'count'")
    refused(lambda x: jax.random.normal(key.split(), (10,)), data, "one that changes 'noise")
    refused(lambda x: queue.dequeue(), data, "one that changes 'queue'")
    refused(lambda x: jnp.sum(x > 0), data, r"loss: expected a float scalar.* got i32\[\]\n")
    refused(lambda x: x, data, r"loss: expected a float scalar.* got f32\[10,3\]\n")
    refused(lambda x: x[:4, 0], data, r"got f32\[4\]\n")
    refused(
        lambda x: {"loss": x[:, 0], "examples": jnp.float32(4)}, data, r"without 'examples' an array.* got f32\[10\]\n"
    )
    refused(lambda x: jnp.mean(x) + 1j, data, r"got c64\[\]\n")
    refused(lambda x, y: jnp.mean(x), [(X, X[:4])], r"one length, its number of examples, got \[4, 25\]")
    refused(lambda x: x, [1.0], r"number of examples, got \[\]")
    refused(by_size, data, r"got \['loss'\] of \[\] for the first and \['error'\]")
    refused(jnp.mean, [], "at least one example, got none")
    assert int(count.read()) == 0
