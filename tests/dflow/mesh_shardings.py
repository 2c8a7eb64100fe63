"""Shardings over eight devices, and the comparison of arrays with theirs."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

P = PartitionSpec
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
X = np.arange(64, dtype=np.float32).reshape(16, 4) / 8


def spread(spec: Any, *kinds: AxisType) -> NamedSharding:
    """A sharding over all 8 devices, on a mesh with one or two axes of these kinds."""
    sizes, names = ((8,), ("d",)) if len(kinds) == 1 else ((4, 2), ("d", "m"))
    return NamedSharding(jax.make_mesh(sizes, names, axis_types=kinds), spec)


ROWS, WHOLE = spread(P("d"), EXPLICIT), spread(P(), EXPLICIT)


def same(ours: Any, theirs: Any) -> None:
    """Assert that the values agree, and that the arrays have equal shardings, in their types and over the devices."""
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        assert jax.typeof(one).sharding.spec == jax.typeof(other).sharding.spec
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
