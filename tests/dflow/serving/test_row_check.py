"""Functions whose rows depend on each other are found, and those whose rows do not are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.serving.row_check import dependence_of_rows
from dflow.serving.signature_tensors import SignatureTensors

W = jnp.arange(6.0).reshape(2, 3)
OTHERS, POSITION, SIZE = "changes with the other rows", "changes with its position", "changes with the size"


def found(fn: Callable[..., Any], *specs: Any) -> str | None:
    exported = dflow.export(fn, *specs)
    return dependence_of_rows(SignatureTensors("f", exported.signature_of(exported.signatures[0])), dflow.jit(fn))


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x - x.mean(0), OTHERS),
        (lambda x: jnp.cumsum(x, 0), OTHERS),
        (lambda x: x[::-1], OTHERS),
        (lambda x: jnp.where(jnp.any(x > 1), x, 2 * x), OTHERS),
        (lambda x: x + jnp.arange(x.shape[0])[:, None], POSITION),
        (lambda x: x / x.shape[0], SIZE),
        # On larger, smaller and negative numbers than those drawn.
        (lambda x: jnp.where(jnp.any(x > 1e30), x, 2 * x), OTHERS),
        (lambda x: jnp.where(jnp.any(x < -50), x, 2 * x), OTHERS),
        (lambda x: jnp.where(jnp.all(jnp.abs(x[1:]) < 0.01), x, 2 * x), OTHERS),
    ],
)
def test_a_dependence_is_found(fn: Any, reason: str) -> None:
    assert reason in str(found(fn, dflow.spec("b, 2", jnp.float32)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_])
def test_functions_of_each_row_pass(dtype: Any) -> None:
    def rows(x: Any) -> Any:
        return {"all": jax.nn.softmax(x.astype(jnp.float32) @ W), "one": x[:, 0], "log": jnp.log(x.astype(jnp.float32))}

    assert found(rows, dflow.spec("b, 2", dtype)) is None


def test_one_input_among_several_is_found() -> None:
    rows, numbers = dflow.spec("b, 2", jnp.float32), dflow.spec("b", jnp.int32)
    assert OTHERS in str(found(lambda x, n: x[:, 0] + n.sum(), rows, numbers))
    assert found(lambda x, n: x[:, 0] + n, rows, numbers) is None

    def padded_to_the_longest_row(ids: Any, lengths: Any) -> Any:
        return jnp.where(jnp.arange(8) < lengths.max(), ids, 0).sum(1)

    assert OTHERS in str(found(padded_to_the_longest_row, dflow.spec("b, 8", jnp.int32), numbers))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8])
@pytest.mark.parametrize(
    "fn",
    [lambda ids: ids - ids.max(), lambda ids: ids - ids.min(), lambda ids: jnp.where(jnp.any(ids > 10), ids, 2 * ids)],
)
def test_a_dependence_on_other_integers_than_those_drawn_is_found(fn: Any, dtype: Any) -> None:
    assert OTHERS in str(found(fn, dflow.spec("b, 2", dtype)))


def test_a_call_that_fails_for_some_values_of_a_row_is_found() -> None:
    signature = dflow.export(lambda x: x, dflow.spec("b, 2", jnp.int32)).signature_of("call")

    def found(error: Exception) -> str | None:
        def fails(x: Any) -> Any:
            if x.max() > 1000:
                raise error
            return x

        return dependence_of_rows(SignatureTensors("f", signature), fails)

    text = "row 0 fails with some values of the other rows of the batch: an id is too large"
    assert found(ValueError("an id is too large")) == text
    with pytest.raises(dflow.TaskLost):  # says nothing of the function
        found(dflow.TaskLost("ps:0 has left", "start it"))


def test_only_functions_with_a_leading_letter_in_common_have_a_batch() -> None:
    def batch(fn: Any, *specs: Any) -> str | None:
        return SignatureTensors("f", dflow.export(fn, *specs).signature_of("call")).batch

    rows = dflow.spec("b, 2", jnp.float32)
    assert batch(lambda x: x, rows) == "b"
    assert batch(lambda x: x.sum(), rows) is None
    assert batch(lambda x, y: x @ y, rows, dflow.spec("2, 3", jnp.float32)) is None
    assert batch(lambda x: x, dflow.spec("b, n", jnp.float32)) is None
    assert batch(lambda x: x, dflow.spec("3, 2", jnp.float32)) is None
