"""Messages that grow with the cluster, and their sizes in bytes."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.wire import large_message
from dflow.distributed.wire.codec import decode_message, encode_message
from dflow.distributed.wire.large_message import LARGE_ROSTER, RosterPacker, pack, unpack
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Mark
from dflow.distributed.wire.messages.roster import Packed, Roster, RosterChange, TaskInfo
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.errors import WireError
from tests.effort import examples


def info(life: int, left: str = "") -> TaskInfo:
    return TaskInfo(
        task_name("worker", life),
        f"10.0.0.{life % 256}:{life}",
        life / 7,
        1.0 if left else None,
        left,
        f"{life:016x}",
        life,
    )


def roster(lives: int, version: int, left: set[int] | None = None, dropped: int = 0) -> Roster:
    """A roster: `lives` tasks have joined, of a few hundred expected; the first `dropped` are no longer listed."""
    tasks = tuple(info(life, "killed" if life in (left or ()) else "") for life in range(dropped, lives))
    expected = tuple(task_name("worker", life) for life in range(lives, LARGE_ROSTER + 300))
    return Roster(tasks, expected, version, "blue", 2, mark=Mark("start", version))


def sent(message: object, payload: bytes) -> tuple[object, memoryview]:
    return decode_message(encode_message(message)), memoryview(payload)  # type: ignore[arg-type]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "drop"]), st.integers(1, 40)), max_size=20))
def test_a_roster_arrives_as_it_was_however_it_changed_since_the_last(acts: list[tuple[str, int]]) -> None:
    packer, lives, dropped, left = RosterPacker(), 3, 0, set[int]()
    for version, (act, count) in enumerate(acts):
        if act == "join":
            lives = min(lives + count, LARGE_ROSTER + 300)
        elif act == "leave":
            left.add(min(dropped + count, lives - 1))
        else:
            dropped = min(dropped + 1, lives - 1)
        whole = roster(lives, version, left, dropped)
        assert unpack(*sent(*packer.pack(whole))) == whole  # type: ignore[arg-type]


def test_many_joins_take_a_fraction_of_the_bytes_and_share_one_payload() -> None:
    packer, raw, packed, payloads = RosterPacker(), 0, 0, set[int]()
    for lives in range(1, LARGE_ROSTER + 300):
        whole = roster(lives, lives)
        message, payload = packer.pack(whole)
        payloads.add(id(payload))
        raw += len(encode_message(whole))
        packed += len(encode_message(message)) + len(payload)
    assert packed < raw / 4
    assert len(payloads) < 100


def test_what_goes_to_many_is_a_payload_and_what_is_small_is_not() -> None:
    change = RosterChange(1, 2, (info(3),))
    assert pack(change) == (change, b"")
    message, payload = pack(change, goes_to_many=True)
    assert message == Packed()
    assert unpack(message, payload) == change
    large = RosterChange(1, 2, tuple(map(info, range(1000))))
    assert unpack(*pack(large)) == large


@pytest.mark.parametrize(
    ("message", "payload", "why"),
    [
        (Packed(), b"not compressed", "a packed message cannot be decompressed"),
        (Packed(), zlib.compress(encode_message(Ok()))[:-3], "a packed message ends early"),
        (Packed(), zlib.compress(bytes(1001)), "is of more than 1000 bytes"),
        (Packed(RosterChange(0, 0, ())), zlib.compress(encode_message(Ok())), "with a change of a roster is a Ok"),
    ],
    ids=["garbage", "short", "bomb", "another message"],
)
def test_a_payload_that_is_no_such_message_is_refused(
    message: Packed, payload: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_message, "MOST_BYTES", 1000)
    with pytest.raises(WireError, match=why):
        unpack(message, payload)
