"""Memory for what is received: aligned, and used again only when nothing refers to it."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from dflow.distributed.transport.buffer_pool import BufferPool
from dflow.lowering.values.alignment import ALIGNMENT_BYTES

LARGE = 1 << 20


def address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


@pytest.mark.parametrize("size_bytes", [0, 1, 63, 4096, LARGE + 1])
def test_a_buffer_has_its_size_is_writable_and_aligned(size_bytes: int) -> None:
    buffer = BufferPool(LARGE).take(size_bytes)
    assert len(buffer) == size_bytes
    assert not buffer.readonly
    assert not size_bytes or address_of(buffer) % ALIGNMENT_BYTES == 0


def test_memory_is_used_again_once_the_array_made_from_it_is_gone() -> None:
    pool = BufferPool(2 * LARGE)
    first = np.frombuffer(pool.take(LARGE), np.float32).reshape(-1, 2)
    where = first.ctypes.data
    second = pool.take(LARGE)
    assert address_of(second) != where
    part = first[5:7]
    del first
    assert address_of(pool.take(LARGE)) != where
    del part
    gc.collect()
    assert address_of(pool.take(LARGE - 100)) == where


def test_no_more_lies_idle_than_asked() -> None:
    pool = BufferPool(3 * LARGE)
    buffers = [pool.take(LARGE) for _ in range(5)]
    assert pool.idle_bytes == 0
    buffers.clear()
    assert 0 < pool.idle_bytes <= 3 * LARGE


def test_a_large_buffer_costs_no_memory_before_it_is_filled() -> None:
    assert len(BufferPool(0).take(4 << 30)) == 4 << 30
