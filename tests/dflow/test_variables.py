"""Variables outside of functions: arithmetic, conversion, and the errors for wrong values and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DeviceError, VariableError
from tests.user_line import line_of

HERE = Path(__file__).name


def test_an_empty_truth_is_numpys_to_say() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        bool(dflow.Variable(jnp.ones(2)))


def test_one_name_with_two_types_is_refused_with_both_lines() -> None:
    first = dflow.Variable(jnp.zeros(2), name="taken")
    with pytest.raises(VariableError, match=r"'taken' holds f32\[2\], but is created again with f32\[3\]") as caught:
        dflow.Variable(jnp.zeros(3), name="taken")
    assert str(caught.value).count(HERE) == 2
    assert line_of(caught.value, __file__).startswith("dflow.Variable(jnp.zeros(3)")
    again = dflow.Variable(jnp.ones(2), name="taken")
    with pytest.warns(dflow.DuplicateNameWarning, match="'taken'"):
        np.testing.assert_array_equal([first, again], [[0, 0], [1, 1]])


def test_a_device_that_no_task_offers_alone() -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("/job:ps/task:7"):
            return x + 1

    with pytest.raises(DeviceError, match="placed on /job:ps/task:7, but no task offers it; the tasks are ") as caught:
        f(1.0)
    assert line_of(caught.value, __file__) == "return x + 1"


def test_tensors_and_columns_of_other_libraries_are_values() -> None:
    torch, pandas = pytest.importorskip("torch"), pytest.importorskip("pandas")
    tensor, spec = torch.arange(4.0), jax.ShapeDtypeStruct((4,), jnp.float32)
    queue, accumulator, target = (
        dflow.FIFOQueue(9, spec),
        dflow.ConditionalAccumulator(spec),
        dflow.Variable(np.zeros(4)),
    )
    for step, given in enumerate((tensor.clone(), torch.nn.Parameter(tensor), pandas.Series(tensor.numpy()))):
        queue.enqueue(given)
        accumulator.apply(given, step)
        target.assign(given)
        made = dflow.Variable(given)
        sharded = dflow.ShardedVariable(given, shards=2)
        for found in (queue.dequeue(), accumulator.take(1), target, made, sharded.read()):
            np.testing.assert_array_equal(np.asarray(found), tensor)
    np.testing.assert_array_equal(dflow.Variable(tensor.to(torch.bfloat16)).read().astype(np.float32), tensor)
    changed = torch.zeros(5000)
    kept = dflow.Variable(changed)
    np.testing.assert_array_equal(dflow.Variable(lambda: changed + 2).read(), np.full(5000, 2, np.float32))
    changed += 1
    assert not kept.read().any()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda v, torch: dflow.Variable(torch.eye(2).to_sparse(), name="w"), "'w': expected dense tensors, got"),
        (lambda v, torch: v.assign(torch.tensor([2**40])), "assign of variable 'v': expected integers from"),
        (lambda v, torch: v.gather(torch.tensor([2**40])), "gather of variable 'v': indices: expected integers from"),
        (lambda v, _: v.assign(pytest.importorskip("pandas").array([None, 1], "Int64")), "'v': .* missing, as at"),
        (lambda v, torch: v.assign(np.array(["a"])), "'v' holds .* an array of <U1, which has no numbers"),
        (lambda v, torch: np.asarray(dflow.ShardedVariable(v, name="s")), r"read it whole: s.read\(\)"),
        (lambda v, torch: dflow.Variable(np.array(["a"]), name="w"), "'w' cannot begin with an array of <U1"),
    ],
)
def test_a_value_without_numbers_that_fit_names_the_variable(use: Any, message: str) -> None:
    with pytest.raises(dflow.DflowError, match=message):
        use(dflow.Variable(np.zeros(1, np.int32), name="v"), pytest.importorskip("torch"))
