"""Running sums on each kind of device, against NumPy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from dflow.tracing.primitives.running_sums import running_sums


@pytest.mark.parametrize("shape", [(0,), (1,), (65, 3)])
def test_sums_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(-9, 9, (*shape, 2)).astype(np.int32)
    np.testing.assert_array_equal(running_sums(values), np.cumsum(values, 0))
    mapped = jax.jit(jax.vmap(running_sums, in_axes=-1))(values)
    np.testing.assert_array_equal(mapped, np.moveaxis(np.cumsum(values, 0), -1, 0))


def test_only_a_cpu_adds_one_by_one() -> None:
    types = jax.ShapeDtypeStruct((64,), np.int32)
    loops = {
        platform: "stablehlo.while"
        in jax.jit(running_sums).trace(types).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda", "tpu")
    }
    assert loops == {"cpu": True, "cuda": False, "tpu": False}
