"""Arrays come back from the payload of one message as they were sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.wire.codec import encode_values, joined
from dflow.lowering.values.alignment import ALIGNMENT_BYTES
from dflow.lowering.values.payload_layout import PayloadLayout
from dflow.tracing.errors import WireError
from dflow.tracing.ir.types import dtype_name

DTYPES = ("bool", "int8", "uint16", "int32", "float16", "float32", "bfloat16", "complex64")
SHAPES = st.lists(st.sampled_from((0, 1, 3, 64)), max_size=3).map(tuple)


@given(st.lists(st.tuples(st.sampled_from((*DTYPES, "key")), SHAPES), max_size=6))
def test_values_come_back(kinds: list[tuple[str, tuple[int, ...]]]) -> None:
    values: list[Any] = []
    for number, (dtype, shape) in enumerate(kinds):
        if dtype == "key":
            values.append(jax.random.split(jax.random.key(number), shape) if shape else jax.random.key(number))
        else:
            values.append(jnp.asarray(np.random.default_rng(number).integers(0, 2, shape), dtype))
    layout = PayloadLayout([(dtype_name(value.dtype), value.shape) for value in values])
    payload = memoryview(joined(encode_values(values)))
    assert len(payload) == layout.size_bytes
    for value, back in zip(values, layout.values(payload), strict=True):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)
        one, other = (jax.random.key_data(x) if dtype_name(x.dtype).startswith("key") else x for x in (value, back))
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_each_array_is_aligned_and_another_size_is_refused() -> None:
    layout = PayloadLayout([("bool", (3,)), ("f32", (2,))])
    assert layout.size_bytes == ALIGNMENT_BYTES + 8
    with pytest.raises(WireError, match="the values take 72 bytes, but 71 bytes came"):
        layout.values(bytes(71))
    with pytest.raises(WireError, match="expected at most 64 extents of 0 or more"):
        PayloadLayout([("f32", (-1,))])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_share_the_memory_of_the_payload_whatever_their_size(dtype: str) -> None:
    values = [jnp.zeros(shape, dtype) for shape in ((), (3,), (1 << 20,))]
    layout = PayloadLayout([(dtype_name(value.dtype), value.shape) for value in values])
    payload = np.frombuffer(joined(encode_values(values)), np.uint8)
    for back in layout.values(memoryview(payload)):
        assert isinstance(back, np.ndarray)
        assert np.shares_memory(back, payload)


@given(st.integers(0, 5), st.sampled_from(["int32", "float32", "bfloat16"]), st.sampled_from([0, 7]))
def test_rows_left_out_are_filled(count: int, dtype: str, fill: int) -> None:
    layout = PayloadLayout([(dtype_name(np.dtype(dtype)), (5, 3)), ("i32", ())], fill)
    whole = np.arange(1, 16).reshape(5, 3).astype(dtype)
    array, number = layout.values(memoryview(whole[:count].tobytes()))
    assert number == count
    assert np.asarray(array).ctypes.data % ALIGNMENT_BYTES == 0
    np.testing.assert_array_equal(np.asarray(array)[:count], whole[:count])
    assert (np.asarray(array)[count:] == fill).all()


@pytest.mark.parametrize("size_bytes", [11, 72])
def test_rows_of_another_size_are_refused(size_bytes: int) -> None:
    layout = PayloadLayout([("f32", (5, 3)), ("i32", ())], 0)
    with pytest.raises(WireError, match=f"rows of 12 bytes, at most 5: expected them alone, got {size_bytes} bytes"):
        layout.values(memoryview(bytes(size_bytes)))


@pytest.mark.parametrize("types", [[("f32", (0, 3))], [("f32", (5, 0))]])
def test_rows_without_elements_are_no_layout(types: Any) -> None:
    with pytest.raises(WireError, match="expected an array with elements"):
        PayloadLayout(types, 0)
