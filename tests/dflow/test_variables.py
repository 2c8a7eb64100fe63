"""Variables outside of functions: arithmetic, conversion, and the errors for wrong values and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DeviceError, VariableError, VariableShapeError
from tests.user_line import line_of

HERE = Path(__file__).name


def test_eager_arithmetic_comparison_and_indexing() -> None:
    v, w = dflow.Variable(jnp.array([1.0, 2.0])), dflow.Variable(jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(v + 1, [2, 3])
    np.testing.assert_array_equal(1 - v, [0, -1])
    np.testing.assert_array_equal(v * w, [3, 8])
    np.testing.assert_array_equal(np.array([10.0, 20.0], np.float32) * v, [10, 40])
    np.testing.assert_array_equal(2**v, [2, 4])
    np.testing.assert_array_equal(-v, [-1, -2])
    np.testing.assert_array_equal(v < w, [True, True])
    assert float(v @ w) == 11.0
    assert float(v[1]) == 2.0
    np.testing.assert_array_equal(v[::-1], [2, 1])
    assert (v.shape, v.ndim, v.size, len(v), v.dtype) == ((2,), 1, 2, 2, jnp.float32)


def test_eager_conversion_to_numpy_and_python() -> None:
    v = dflow.Variable(jnp.array([1.0, 2.0]), name="v")
    np.testing.assert_array_equal(np.asarray(v), [1, 2])
    assert np.asarray(v, dtype=np.float64).dtype == np.float64
    assert [float(x) for x in v] == [1.0, 2.0]
    assert float(dflow.Variable(1.5)) == 1.5
    assert int(dflow.Variable(3)) == 3
    assert "abcd"[dflow.Variable(2)] == "c"
    assert f"{dflow.Variable(1.25):.1f}" == "1.2"
    assert not dflow.Variable(False)
    assert repr(v) == f"{v}" == "<Variable 'v': f32[2]>"
    assert v in [v]
    assert (v == dflow.Variable(v.read())).all()


def test_an_empty_truth_is_numpys_to_say() -> None:
    with pytest.raises(ValueError, match="ambiguous"):
        bool(dflow.Variable(jnp.ones(2)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (jnp.ones(3), r"holds f32\[2\] but assign was given f32\[3\]"),
        (jnp.ones(2, jnp.int32), r"holds f32\[2\] but assign was given i32\[2\]"),
        (jnp.ones(2, jnp.bfloat16), r"holds f32\[2\] but assign was given bf16\[2\]"),
        (1.0, r"holds f32\[2\] but assign was given"),
    ],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_wrong_shape_or_dtype_is_refused(value: Any, text: str, traced: bool) -> None:
    v = dflow.Variable(jnp.zeros(2), name="v")

    def write(x: Any) -> None:
        v.assign(x)

    with pytest.raises(VariableShapeError, match=text) as caught:
        (dflow.jit(write) if traced else write)(value)
    assert line_of(caught.value, __file__) == "v.assign(x)"
    np.testing.assert_array_equal(v, [0, 0])


def test_one_name_with_two_types_is_refused_with_both_lines() -> None:
    first = dflow.Variable(jnp.zeros(2), name="taken")
    with pytest.raises(VariableError, match=r"'taken' holds f32\[2\], but is created again with f32\[3\]") as caught:
        dflow.Variable(jnp.zeros(3), name="taken")
    assert str(caught.value).count(HERE) == 2
    assert line_of(caught.value, __file__).startswith("dflow.Variable(jnp.zeros(3)")
    again = dflow.Variable(jnp.ones(2), name="taken")
    with pytest.warns(dflow.DuplicateNameWarning, match="'taken'"):
        np.testing.assert_array_equal([first, again], [[0, 0], [1, 1]])


def test_a_variable_inside_traced_code_is_refused() -> None:
    with pytest.raises(VariableError, match=r"a variable .* is created inside traced code") as caught:
        dflow.jit(lambda: dflow.Variable(1.0, name="late"))()
    assert "late" in str(caught.value)
    assert "dflow.Variable(1.0" in line_of(caught.value, __file__)


def test_a_device_name_that_cannot_be_read() -> None:
    with pytest.raises(DeviceError, match="'gpu' is not the name of a device; write") as caught, dflow.device("gpu"):
        pass
    assert "/job:ps/task:0" in str(caught.value)
    assert 'dflow.device("gpu")' in line_of(caught.value, __file__)


def test_a_device_that_no_task_offers_alone() -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("/job:ps/task:7"):
            return x + 1

    with pytest.raises(DeviceError, match="placed on /job:ps/task:7, but no task offers it; the tasks are ") as caught:
        f(1.0)
    assert line_of(caught.value, __file__) == "return x + 1"
