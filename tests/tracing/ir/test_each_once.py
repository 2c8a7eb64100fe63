"""Equal numbers found by hashing, against Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.tracing.ir.each_once import representatives
from tests.effort import examples


@pytest.mark.once
@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.integers(0, 3), st.integers(-(2**31), 2**31 - 1)), st.booleans()), min_size=8, max_size=8
    )
)
def test_equal_numbers_have_one_representative(drawn: list[tuple[int, bool]]) -> None:
    numbers, wanted = map(np.asarray, zip(*drawn, strict=True))
    found = np.asarray(jax.jit(representatives)(numbers.astype(np.int32), wanted))
    for place, (number, is_wanted) in enumerate(drawn):
        equal = [other for other, each in enumerate(drawn) if each == (number, True)] if is_wanted else [place]
        assert found[place] in equal
        assert {found[other] for other in equal} == {found[place]}


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_all_numbers_may_be_equal_or_differ(count: int) -> None:
    differ = np.random.default_rng(0).permutation(count).astype(np.int32) * 4096
    np.testing.assert_array_equal(representatives(jnp.asarray(differ)), np.arange(count))
    assert len({*np.asarray(representatives(jnp.full(count, 7, jnp.int32)))}) == min(1, count)
