"""The warning for a dense gradient of a large table, with the op that needs it."""

from __future__ import annotations

import warnings
from typing import Any

import optax
import pytest

import dflow
from dflow.tracing.rows import rows_to_dense
from dflow.tracing.state.resources import Variable
from tests.tracing.rows.lookup_table import IDS, loss_of


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_to_dense, "LARGE_BYTES", 1)
    monkeypatch.setattr(rows_to_dense, "LARGE_RATIO", 1)


def test_a_dense_gradient_of_a_large_table_is_reported_with_what_needs_it(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.adam(0.1), [table])

    @dflow.jit
    def step(i: Any) -> None:
        gradients = dflow.grad(lambda: loss_of(table, i), [table])()
        optimizer.apply(gradients)

    with pytest.warns(dflow.DenseGradientWarning) as caught:
        step(IDS)
    [message] = [str(warning.message) for warning in caught]
    assert "gradient of 'table', float32[13,2], has 5 rows and is made dense, 104 bytes" in message
    assert "test_dense_gradient_warning.py" in message
    assert "lazy_rows=True" in message


def test_what_stays_rows_is_not_reported(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [table])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dflow.jit(lambda i: optimizer.apply(dflow.grad(lambda: loss_of(table, i), [table])()))(IDS)


def test_a_gradient_that_is_given_back_is_reported(table: Variable) -> None:
    with pytest.warns(dflow.DenseGradientWarning, match=r"for the result of the function\n(.|\n)*rows=True"):
        dflow.jit(lambda i: dflow.grad(lambda: loss_of(table, i), table)())(IDS)


def test_a_dense_gradient_outside_of_traced_code_is_reported(table: Variable) -> None:
    with pytest.warns(dflow.DenseGradientWarning, match=r"outside of traced code(.|\n)*dflow.jit"):
        dflow.grad(lambda: loss_of(table, IDS), table)()
