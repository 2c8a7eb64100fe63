"""Mutual proof that both sides of a connection know a shared secret, without sending it.

Why: a shared secret is one file to copy, while certificates are one for each machine. The challenge runs inside a TLS
connection whose certificate no authority has signed, so a proof must be invalid on any other connection. It covers the
certificate that the listener showed; a man in the middle cannot show that certificate, as it lacks the key. All later
messages on the connection, names included, come from a peer that knows the secret.

Each side sends a nonce, the connector first. The connector then sends the first proof, so an unauthenticated connector
never gets the listener's. A proof is HMAC-SHA256, keyed by the secret, over the prover's role, the binding (the SHA-256
of the listener's certificate) and both nonces, each preceded by its length.

Invariants: no I/O, no clock, no random numbers. A side is done only after a valid proof from the other. Any other
message, or one out of order, raises `SecurityError`, and the machine then accepts nothing more. No error contains the
secret or a proof.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable

from dflow.tracing.errors import InternalError, SecurityError

#: Size of each message of the challenge, a nonce or a proof.
MESSAGE_BYTES = 32
#: Least size of a secret, which must be random: an attacker dialled by a connector can test guesses on its proof.
MIN_SECRET_BYTES = 32

_LABEL = b"dflow shared secret, 1"


class Side(enum.Enum):
    """A side of the connection."""

    CONNECTOR = b"connector"
    LISTENER = b"listener"

    @property
    def other(self) -> Side:
        """The other side."""
        return Side.LISTENER if self is Side.CONNECTOR else Side.CONNECTOR


class Challenge:
    """One side of the challenge, as a state machine; `done` is set when the other side has proved the secret.

    `nonce`    `MESSAGE_BYTES` random bytes, never used before
    `binding`  the bytes that both ends of this connection share and no other connection has
    raises     SecurityError when the secret is too short
    """

    def __init__(self, role: Side, *, secret: bytes, nonce: bytes, binding: bytes) -> None:
        require_long(secret)
        if len(nonce) != MESSAGE_BYTES:
            raise InternalError(f"a nonce of {len(nonce)} bytes where {MESSAGE_BYTES} are due")
        self._role = role
        self._secret = secret
        self._nonces = {role: nonce}
        self._binding = binding
        self._has_failed = False
        self.done = False

    def begin(self) -> list[bytes]:
        """Return the messages to send first: the nonce for the connector, none for the listener."""
        return [self._nonces[self._role]] if self._role is Side.CONNECTOR else []

    def receive(self, message: bytes) -> list[bytes]:
        """Take the other side's next message and return the messages to send; raises SecurityError if it is invalid."""
        if self._has_failed or self.done:
            raise SecurityError("a message of the challenge came after its end")
        self._has_failed = True
        if len(message) != MESSAGE_BYTES:
            raise SecurityError(f"a message of {len(message)} bytes came where the challenge has {MESSAGE_BYTES}")
        answers = self._proved(message) if self._role.other in self._nonces else self._opened(message)
        self._has_failed = False
        return answers

    def _opened(self, nonce: bytes) -> list[bytes]:
        if nonce == self._nonces[self._role]:
            raise SecurityError("the other side sent this side's own nonce back")
        self._nonces[self._role.other] = nonce
        return [self._nonces[self._role] if self._role is Side.LISTENER else self._proof(self._role)]

    def _proved(self, proof: bytes) -> list[bytes]:
        if not hmac.compare_digest(proof, self._proof(self._role.other)):
            raise SecurityError(
                "the other side does not know the shared secret, or a process in between answers; "
                "give both the same file as DFLOW_SECRET_FILE"
            )
        self.done = True
        return [self._proof(self._role)] if self._role is Side.LISTENER else []

    def _proof(self, prover: Side) -> bytes:
        nonces = (self._nonces[Side.CONNECTOR], self._nonces[Side.LISTENER])
        text = covered([_LABEL, prover.value, self._binding, *nonces])
        return hmac.new(self._secret, text, hashlib.sha256).digest()


def covered(fields: Iterable[bytes]) -> bytes:
    """Join the fields, each after its length, so that different fields never give the same bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def require_long(secret: bytes) -> None:
    """Raise SecurityError for a secret that is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise SecurityError(
            f"the shared secret has {len(secret)} bytes and needs {MIN_SECRET_BYTES}; "
            "make one by `dflow certs secret FILE`"
        )
