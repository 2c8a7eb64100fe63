"""The challenge by a shared secret: which side believes which, whatever the other sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.security.challenge import MESSAGE_BYTES, challenge, covered
from dflow.tracing.errors import SecurityError
from tests.effort import examples

SECRET = b"s" * 32
NONCES = st.binary(min_size=MESSAGE_BYTES, max_size=MESSAGE_BYTES)
BINDING = b"certificate"


class Knows(NamedTuple):
    """One side, and what it knows of the connection."""

    is_listener: bool
    nonce: bytes
    secret: bytes = SECRET
    binding: bytes = BINDING

    def tell(self, told: Iterable[bytes]) -> tuple[list[bytes], str]:
        """Let it receive these messages; return its own messages, and why it does not believe the other side."""
        said: list[bytes] = []
        receive = partial(next, iter(told))
        try:
            challenge(
                self.secret, self.nonce, self.binding, is_listener=self.is_listener, send=said.append, receive=receive
            )
        except StopIteration:
            return said, "waits"
        except SecurityError as error:
            return said, str(error)
        return said, ""


CONNECTOR, LISTENER = Knows(False, b"c" * MESSAGE_BYTES), Knows(True, b"l" * MESSAGE_BYTES)


def meet(connector: Knows, listener: Knows) -> tuple[str, str]:
    """Carry all messages to and fro; return why each side does not believe the other."""
    heard: list[bytes] = []
    for _ in range(3):
        said, of_connector = connector.tell(heard)
        heard, of_listener = listener.tell(said)
    return of_connector, of_listener


@given(NONCES, NONCES, st.binary(min_size=32, max_size=64), st.binary(max_size=40))
def test_two_who_know_the_secret_believe_each_other(one: bytes, two: bytes, secret: bytes, binding: bytes) -> None:
    why = meet(Knows(False, one, secret, binding), Knows(True, two, secret, binding))
    if one == two:
        assert "own nonce" in why[1]
    else:
        assert why == ("", "")


@settings(max_examples=examples(300))
@given(
    st.sampled_from([CONNECTOR, LISTENER]),
    st.lists(st.sampled_from(["own", "replay", "random", "short"]) | st.binary(), max_size=4),
)
def test_no_sequence_of_messages_without_the_secret_is_believed(side: Knows, script: Sequence[str | bytes]) -> None:
    """The attacker sees all that this side sends, and a good run of the same nonces, but of another binding."""
    elsewhere = [one._replace(binding=b"elsewhere") for one in (CONNECTOR, LISTENER)]
    first = elsewhere[0].tell([LISTENER.nonce])[0]
    seen = [*first, *elsewhere[1].tell(first)[0]]
    told: list[bytes] = []
    for number, word in enumerate(script):
        own, _ = side.tell(told)
        kinds = {"own": (own or seen)[-1], "replay": seen[number % 4], "random": b"r" * MESSAGE_BYTES, "short": b"r"}
        told.append(word if isinstance(word, bytes) else kinds[word])
        assert side.tell(told)[1]


@given(st.lists(st.binary(max_size=5), max_size=4), st.lists(st.binary(max_size=5), max_size=4))
def test_no_two_lists_of_fields_are_covered_by_the_same_text(one: list[bytes], two: list[bytes]) -> None:
    assert (covered(one) == covered(two)) == (one == two)
