"""Variables outside of functions: arithmetic, conversion, and the errors for wrong values and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
