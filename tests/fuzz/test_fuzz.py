"""A live task in a separate process under malformed and hostile frames. `make fuzz` sends more of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.link import Kind
from dflow.distributed.wire import codec
from dflow.distributed.wire.messages.message import Message
from tests.effort import examples
from tests.fuzz.__main__ import verdict
from tests.fuzz.scripts import MESSAGES, PLAN, Script, hello, numbered, packed
from tests.fuzz.siege import Tally, Victim, besiege, send_script
from tests.fuzz.values import ENCODER, struct_of

# The messages and the frames are the same on every Python and JAX.
pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with Victim(f"unix:{tmp_path_factory.mktemp('fuzz') / 'task'}") as victim:
        yield victim


def test_a_task_minds_no_frames_and_holds_nothing_of_them(victim: Victim) -> None:
    # Until the first plan has arrived, and has loaded XLA's compiler.
    rounds = itertools.count()
    while not victim.usage().plans:
        besiege(victim, next(rounds), examples(500), Tally())
    tally = Tally()
    for number in itertools.islice(rounds, 3):
        besiege(victim, number, examples(500), tally)
    assert verdict(tally, 0) == 0


def test_a_coordinator_minds_no_frames_either(tmp_path: Path) -> None:
    tally = Tally()
    with Victim(f"unix:{tmp_path / 'coordinator'}", "coordinator") as coordinator:
        for number in range(3):
            besiege(coordinator, number, examples(400), tally)
    assert verdict(tally, 0) == 0


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), data=st.binary(max_size=100), place=st.integers(0, 100))
def test_a_task_minds_no_bytes_at_any_place_of_the_handshake(
    victim: Victim, rng: random.Random, data: bytes, place: int
) -> None:
    start = hello(rng)
    send_script(victim.address, Script(start[:place] + data + start[place:], 1))
    victim.check()


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: str(kind.tag))
def test_a_task_minds_no_message_with_senseless_fields(victim: Victim, kind: msgspec.inspect.StructType) -> None:
    rng = random.Random(str(kind.tag))
    frames = [
        packed(ENCODER.encode(struct_of(kind, rng)), rng.randbytes(rng.choice((0, 8))), which, number)
        for number in range(20)
        for which in (Kind.REQUEST, Kind.NOTIFY)
    ]
    frames = [numbered(frame, number) for number, frame in enumerate(frames, 2)]
    send_script(victim.address, Script(hello(rng) + b"".join(frames), len(frames)))
    victim.check()


def test_the_fuzzer_knows_every_message_and_makes_some_that_are_right() -> None:
    assert {kind.cls for kind in MESSAGES} == set(codec.MESSAGES)
    rng, decoder = random.Random(0), msgspec.msgpack.Decoder(codec.ANY_MESSAGE)
    for kind in MESSAGES:
        assert any(_is_right(decoder, ENCODER.encode(struct_of(kind, rng))) for _ in range(200)), kind


def test_the_fuzzer_has_values_for_every_field_of_a_plan() -> None:
    assert isinstance(PLAN, msgspec.inspect.StructType)
    rng = random.Random(0)
    assert all(ENCODER.encode(struct_of(PLAN, rng)) for _ in range(100))


def _is_right(decoder: msgspec.msgpack.Decoder[Message], data: bytes) -> bool:
    try:
        decoder.decode(data)
    except msgspec.DecodeError:
        return False
    return True
