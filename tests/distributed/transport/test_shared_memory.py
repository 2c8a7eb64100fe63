"""Memory that two processes see: who may write where, and when a place is free again."""

from __future__ import annotations

import errno
import gc
import os
import socket
import struct

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport import shared_memory
from dflow.distributed.transport.link import Limits
from dflow.distributed.transport.shared_memory import (
    GRAIN_BYTES,
    SHARED_FROM_BYTES,
    Blocks,
    SharedPool,
    SharedView,
    agree_on_memory,
)
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.codec import decode_array
from dflow.distributed.wire.messages.basic import Ok
from dflow.tracing.errors import TransportClosed, WireError
from tests.distributed.transports import DEADLINE_S, Recorder, echo, reach
from tests.effort import examples

SIZE = 1 << 20
PAGES = 16


def pool_and_view(size_bytes: int = SIZE) -> tuple[SharedPool, SharedView]:
    pool = SharedPool(size_bytes)
    return pool, SharedView(os.dup(pool.descriptor))


def test_a_place_is_free_again_once_the_receivers_array_is_gone() -> None:
    pool, view = pool_and_view()
    place = pool.put(bytes(SIZE))
    assert place is not None
    array = jax.device_put(decode_array("float32", (SIZE // 4,), view.take(place, SIZE)), may_alias=True)
    assert pool.put(b"more") is None
    jax.block_until_ready(array)
    del array
    gc.collect()
    assert pool.put(bytes(SIZE)) is not None


@pytest.mark.parametrize(
    ("slot", "offset", "size"), [(4096, 0, 1), (0, 1, 1), (0, 0, SIZE + 1), (0, SIZE, 1), (0, (1 << 64) - 4096, 4096)]
)
def test_a_place_outside_is_refused(slot: int, offset: int, size: int) -> None:
    _, view = pool_and_view()
    with pytest.raises(WireError, match="no value of"):
        view.take(struct.pack("<QQQ", slot, offset, size), 1 << 62)


def test_a_value_over_the_limit_is_refused() -> None:
    pool, view = pool_and_view()
    place = pool.put(bytes(101))
    assert place is not None
    with pytest.raises(WireError, match="a payload of 101 bytes is over the limit of 100"):
        view.take(place, 100)


def test_memory_whose_size_can_change_is_refused() -> None:
    descriptor = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(WireError, match="whose size it could change"):
        SharedView(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("unable", [1, 2])
def test_a_side_that_cannot_make_memory_sends_by_the_socket(monkeypatch: pytest.MonkeyPatch, unable: int) -> None:
    put, placed, left = SharedPool.put, [], iter(range(unable))

    class Pool(SharedPool):
        def __init__(self, size_bytes: int) -> None:
            if next(left, None) is not None:
                raise OSError(errno.EFBIG, "File too large")
            super().__init__(size_bytes)

    monkeypatch.setattr(shared_memory, "SharedPool", Pool)
    monkeypatch.setattr(SharedPool, "put", lambda pool, payload: placed.append(put(pool, payload)) or placed[-1])
    transport = SocketTransport()
    listener = transport.listen("unix:", name="server", handler=Recorder(echo))
    peer = reach(transport, listener.address, Recorder())
    assert len(peer.call(Ok(), bytes(SHARED_FROM_BYTES), timeout_s=DEADLINE_S).payload) == SHARED_FROM_BYTES
    assert len(placed) == 2 - unable
    listener.close()


def test_a_side_that_offers_no_memory_is_told() -> None:
    one, other = socket.socketpair()
    with one:
        other.send(b"M")
        with pytest.raises(WireError, match="no descriptor came"):
            agree_on_memory(one, SIZE)
        other.close()
    one, other = socket.socketpair()
    with one:
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(TransportClosed, match="before it offered shared memory"):
            agree_on_memory(one, SIZE)
        other.close()


@pytest.mark.parametrize(("size_bytes", "is_shared"), [(SHARED_FROM_BYTES - 1, False), (SHARED_FROM_BYTES, True)])
def test_large_values_between_processes_of_one_machine_go_by_shared_memory(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, is_shared: bool
) -> None:
    put, placed = SharedPool.put, []
    monkeypatch.setattr(SharedPool, "put", lambda pool, payload: placed.append(put(pool, payload)) or placed[-1])
    transport = SocketTransport()
    listener = transport.listen("unix:", name="server", handler=Recorder(echo))
    peer = reach(transport, listener.address, Recorder())
    assert len(peer.call(Ok(), bytes(size_bytes), timeout_s=DEADLINE_S).payload) == size_bytes
    assert [place is not None for place in placed] == [True, True] * is_shared
    released: list[bool] = []
    peer.notify(Ok(), bytes(size_bytes), lambda: released.append(True))
    assert released == [True] * is_shared  # it was copied; else it is kept until the other side has it
    listener.close()


def test_what_does_not_fit_into_the_memory_goes_over_the_socket() -> None:
    transport = SocketTransport(Limits(shared_bytes=1 << 20))
    listener = transport.listen("unix:", name="server", handler=Recorder(echo))
    peer = reach(transport, listener.address, Recorder())
    sent = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8)
    held = [peer.call(Ok(), sent[: n << 18].data, timeout_s=DEADLINE_S).payload for n in (1, 2, 3, 4, 12, 1)]
    for payload, n in zip(held, (1, 2, 3, 4, 12, 1), strict=True):
        assert np.array_equal(np.frombuffer(payload, np.uint8), sent[: n << 18])
    listener.close()


@settings(max_examples=examples(100))
@given(st.lists(st.one_of(st.integers(0, 6 * GRAIN_BYTES), st.sampled_from(["oldest", "newest"])), max_size=40))
def test_blocks_are_the_first_gap_that_fits(actions: list[int | str]) -> None:
    """Against a model that marks every page."""
    blocks = Blocks(PAGES * GRAIN_BYTES + 100)
    used = [False] * PAGES
    taken: list[tuple[int, int]] = []
    for action in actions:
        if isinstance(action, int):
            pages = max(-(-action // GRAIN_BYTES), 1)
            fits = [at for at in range(PAGES - pages + 1) if not any(used[at : at + pages])]
            offset = blocks.take(action)
            assert offset == (fits[0] * GRAIN_BYTES if fits else None)
            if offset is not None:
                taken.append((offset // GRAIN_BYTES, pages))
                used[fits[0] : fits[0] + pages] = [True] * pages
        elif taken:
            at, pages = taken.pop(0 if action == "oldest" else -1)
            blocks.give_back(at * GRAIN_BYTES)
            used[at : at + pages] = [False] * pages
