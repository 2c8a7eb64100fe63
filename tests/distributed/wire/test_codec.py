from __future__ import annotations

import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.transport.buffer_pool import RECEIVED
from dflow.distributed.wire import codec
from dflow.distributed.wire.messages.basic import ArrayInfo, Hello
from dflow.tracing.errors import WireError
from tests.own_keys import keys_of_an_own_algorithm


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        codec._ENCODER.encode({"type": "Explode"}),
        codec._ENCODER.encode({"type": "Hello"}),
        codec._ENCODER.encode({"type": "Hello", "name": 3}),
        codec._ENCODER.encode(["Hello", "name"]),
        b"\x91" * 100_000,
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match=f"{len(data)} bytes are no message of this protocol"):
        codec.decode_message(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        codec.decode_message(data)


def test_a_field_of_a_type_that_does_not_travel_is_refused() -> None:
    with pytest.raises(WireError, match="Hello cannot be sent"):
        codec.encode_message(Hello(name=object()))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(codec.DTYPES))
def test_an_array_comes_back_bit_by_bit(name: str) -> None:
    dtype = codec.DTYPES[name]
    for shape in ((), (0,), (2, 0, 4), (2, 3, 4)):
        bits = np.random.default_rng(0).integers(0, 2, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
        array = np.frombuffer(bits.tobytes(), dtype).reshape(shape)
        back = codec.decode_array(name, shape, codec.encode_array(array))
        assert (back.dtype, back.shape, back.tobytes()) == (dtype, shape, array.tobytes())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.bool_, jnp.float8_e4m3fn])
def test_a_jax_array_is_encoded_without_a_copy(dtype: Any) -> None:
    array = jnp.ones((4, 1024), dtype)
    data = codec.encode_array(array)
    assert np.frombuffer(data, np.uint8).ctypes.data == array.unsafe_buffer_pointer()
    assert codec.decode_array(array.dtype.name, array.shape, data).tolist() == array.tolist()


def test_strided_and_big_endian_arrays_travel_in_order() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    assert codec.decode_array("int32", (4, 3), codec.encode_array(array)).tolist() == array.tolist()


def test_a_payload_of_another_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(WireError, match=r"float32\[2, 3\] takes 24 bytes but the payload has 23"):
        codec.decode_array("float32", (2, 3), bytes(23))


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(1, "M8[s]")])
def test_arrays_that_are_not_numbers_are_refused(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(WireError, match="does not travel"):
        codec.encode_array(array)


@pytest.mark.parametrize("algorithm", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_come_back_as_keys(algorithm: str) -> None:
    for shape in ((), (0,), (2, 3)):
        keys = jax.random.split(jax.random.key(3, impl=algorithm), shape)
        back = codec.decode_array(keys.dtype.name, shape, codec.encode_array(keys))
        assert (back.dtype, back.shape) == (keys.dtype, shape)
        np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))
        with pytest.raises(WireError, match="but the payload has 3"):
            codec.decode_array(keys.dtype.name, shape, bytes(3))


def test_keys_of_an_unknown_algorithm_are_refused() -> None:
    with pytest.raises(WireError, match=r"dtype 'key<own>' does not travel; these do: .*key<fry>"):
        codec.encode_array(keys_of_an_own_algorithm())


def test_a_received_array_goes_to_the_cpu_without_a_copy() -> None:
    buffer = RECEIVED.take(4 * 4096)
    array = codec.decode_array("float32", (4096,), buffer)
    array[:] = 1
    placed = jax.device_put(array, jax.devices("cpu")[0], may_alias=True)
    assert placed.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((-2, -3), r"shape \(-2, -3\) has a negative extent"),
        ((0, 1 << 63), "is larger than any array"),
        ((0, 1 << 40, 1 << 40), "is larger than any array"),
        ((1,) * 65, "a shape of 65 extents; at most 64 are taken"),
        (((1 << 64) - 1,) * 100_000, "a shape of 100000 extents"),
        ((1 << 61, 2, 0), "is larger than any array"),
    ],
)
def test_a_shape_that_no_array_has_is_refused_at_once(shape: tuple[int, ...], text: str) -> None:
    for decode in (
        lambda: codec.decode_array("float32", shape, b""),
        lambda: codec.decode_arrays([ArrayInfo("float32", shape)], b""),
    ):
        with pytest.raises(WireError, match=text):
            decode()


@given(st.lists(st.integers(-1, 1 << 64), max_size=70).map(tuple), st.sampled_from(sorted(codec.DTYPES)))
def test_any_shape_gives_an_array_or_a_wire_error(shape: tuple[int, ...], dtype: str) -> None:
    try:
        size = codec.array_bytes(dtype, shape)
        assert codec.decode_array(dtype, shape, bytes(size)).shape == shape if size < 1 << 16 else True
    except WireError:
        pass
