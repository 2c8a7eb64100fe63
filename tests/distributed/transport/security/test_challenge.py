"""The shared secret's challenge, as a machine: who is believed, whatever is sent in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.security.challenge import MESSAGE_BYTES, Challenge, Side, covered
from dflow.tracing.errors import InternalError, SecurityError
from tests.effort import examples

SECRET, OTHER_SECRET = b"s" * 32, b"t" * 32
NONCES = st.binary(min_size=MESSAGE_BYTES, max_size=MESSAGE_BYTES)
BINDING = b"certificate"


def side(role: Side, secret: bytes = SECRET, binding: bytes = BINDING, nonce: bytes | None = None) -> Challenge:
    default = {Side.CONNECTOR: b"c", Side.LISTENER: b"l"}[role] * MESSAGE_BYTES
    return Challenge(role, secret=secret, nonce=nonce or default, binding=binding)


def run(connector: Challenge, listener: Challenge) -> None:
    """Carry messages to and fro until both are quiet."""
    to_listener, to_connector = connector.begin(), listener.begin()
    while to_listener or to_connector:
        to_connector += [answer for message in to_listener for answer in listener.receive(message)]
        to_listener = [answer for message in to_connector for answer in connector.receive(message)]
        to_connector = []


@given(NONCES, NONCES, st.binary(min_size=32, max_size=64), st.binary(max_size=40))
def test_two_who_know_the_secret_believe_each_other(one: bytes, two: bytes, secret: bytes, binding: bytes) -> None:
    connector, listener = side(Side.CONNECTOR, secret, binding, one), side(Side.LISTENER, secret, binding, two)
    if one == two:
        with pytest.raises(SecurityError, match="own nonce"):
            run(connector, listener)
        return
    run(connector, listener)
    assert connector.done
    assert listener.done


@pytest.mark.parametrize(
    ("secret", "binding"), [(OTHER_SECRET, BINDING), (SECRET, b"the certificate of one in the middle")]
)
def test_another_secret_or_another_connection_is_believed_by_neither(secret: bytes, binding: bytes) -> None:
    connector, listener = side(Side.CONNECTOR), side(Side.LISTENER, secret, binding)
    with pytest.raises(SecurityError, match="does not know the shared secret, or a process in between answers"):
        run(connector, listener)
    assert not connector.done
    assert not listener.done


def test_a_stranger_is_told_no_proof() -> None:
    listener = side(Side.LISTENER)
    assert listener.begin() == []
    assert listener.receive(b"x" * MESSAGE_BYTES) == [b"l" * MESSAGE_BYTES]
    with pytest.raises(SecurityError):
        listener.receive(b"y" * MESSAGE_BYTES)


def test_the_listener_answers_nothing_after_a_wrong_proof() -> None:
    listener, connector = side(Side.LISTENER), side(Side.CONNECTOR)
    answers = listener.receive(connector.begin()[0])
    right = connector.receive(answers[0])[0]
    with pytest.raises(SecurityError):
        listener.receive(bytes(MESSAGE_BYTES))
    with pytest.raises(SecurityError, match="after its end"):
        listener.receive(right)
    assert not listener.done


def test_a_proof_sent_back_proves_nothing() -> None:
    """One who knows no secret answers the connector with its own messages, or with those of a listener elsewhere."""
    connector = side(Side.CONNECTOR)
    with pytest.raises(SecurityError, match="this side's own nonce back"):
        connector.receive(connector.begin()[0])
    connector = side(Side.CONNECTOR)
    proof = connector.receive(b"x" * MESSAGE_BYTES)[0]
    with pytest.raises(SecurityError, match="does not know"):
        connector.receive(proof)


def test_a_listener_is_no_oracle_for_another_connection() -> None:
    """One in the middle runs two connections at once, each with the nonces of the other, and passes proofs on."""
    victim = side(Side.CONNECTOR, binding=b"the middle's certificate")
    server = side(Side.LISTENER, binding=b"the server's certificate")
    nonce = server.receive(victim.begin()[0])[0]
    proof = victim.receive(nonce)[0]
    with pytest.raises(SecurityError):
        server.receive(proof)


@settings(max_examples=examples(300))
@given(
    st.sampled_from(list(Side)),
    st.lists(st.sampled_from(["own", "replay", "random", "short"]) | st.binary(), max_size=6),
)
def test_no_sequence_of_messages_without_the_secret_is_believed(role: Side, script: Sequence[str | bytes]) -> None:
    """The attacker sees all that this side sends, and a good run of the same nonces, but of another binding."""
    seen: list[bytes] = []
    honest = side(Side.CONNECTOR, binding=b"elsewhere"), side(Side.LISTENER, binding=b"elsewhere")
    first = honest[0].begin()
    second = honest[1].receive(first[0])
    third = honest[0].receive(second[0])
    seen += [*first, *second, *third, *honest[1].receive(third[0])]
    machine = side(role)
    own = machine.begin()
    for number, word in enumerate(script):
        kinds = {"own": (own or seen)[-1], "replay": seen[number % 4], "random": b"r" * MESSAGE_BYTES, "short": b"r"}
        with contextlib.suppress(SecurityError):
            own += machine.receive(word if isinstance(word, bytes) else kinds[word])
        assert not machine.done


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_no_two_lists_of_fields_are_covered_by_the_same_text(one: list[bytes], two: list[bytes]) -> None:
    assert (covered(one) == covered(two)) == (one == two)


@given(st.binary(max_size=31))
def test_a_short_secret_is_refused_and_not_shown(secret: bytes) -> None:
    with pytest.raises(SecurityError, match=f"has {len(secret)} bytes and needs 32; make one by `dflow certs secret"):
        side(Side.LISTENER, secret)


def test_a_nonce_of_another_size_is_a_fault_of_the_caller() -> None:
    with pytest.raises(InternalError, match="a nonce of 1 bytes"):
        side(Side.LISTENER, nonce=b"x")
