"""Proving to each other that both sides know a secret, without saying it.

Why: a shared secret is one file to copy, where certificates are one for each machine. The challenge runs inside a TLS
connection whose certificate nobody vouches for, so a proof has to be worth nothing on any other connection: it covers
the certificate that the listener showed, and one in the middle cannot show that one, not having its key. Whatever is
said afterwards over the connection, names included, is said by who has proved.

Each side sends a nonce, the connector first. Then the connector proves first, so that a stranger who connects is told
no proof. A proof is HMAC-SHA256, by the secret, of the role of who proves, the binding (the SHA-256 of the listener's
certificate) and both nonces, each with its length before it.

Invariants: no I/O, no clock, no random numbers; a side is done only after a right proof by the other; whatever else
comes, or comes out of order, is a `SecurityError`, after which the machine takes nothing more. Neither the secret nor a
proof is in any error.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable

from dflow.tracing.errors import InternalError, SecurityError

#: Every message of the challenge, a nonce or a proof, has so many bytes.
MESSAGE_BYTES = 32
#: A secret is at least so long, and drawn at random: whoever gets a connector to dial it can try guesses on its proof.
MIN_SECRET_BYTES = 32

_LABEL = b"dflow shared secret, 1"


class Role(enum.Enum):
    """Which side of the connection this is."""

    CONNECTOR = b"connector"
    LISTENER = b"listener"

    @property
    def other(self) -> Role:
        """The other side."""
        return Role.LISTENER if self is Role.CONNECTOR else Role.CONNECTOR


class Challenge:
    """One side of the exchange, as a machine.

    `nonce`    `MESSAGE_BYTES` random bytes, never used before
    `binding`  what only these two ends of this very connection can agree on
    raises     SecurityError when the secret is too short
    """

    def __init__(self, role: Role, *, secret: bytes, nonce: bytes, binding: bytes) -> None:
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
        """What to send first."""
        return [self._nonces[self._role]] if self._role is Role.CONNECTOR else []

    def receive(self, message: bytes) -> list[bytes]:
        """Take the other side's next message and give what to send then; raises SecurityError."""
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
        return [self._nonces[self._role] if self._role is Role.LISTENER else self._proof(self._role)]

    def _proved(self, proof: bytes) -> list[bytes]:
        if not hmac.compare_digest(proof, self._proof(self._role.other)):
            raise SecurityError(
                "the other side does not know the shared secret, or someone stands in between; "
                "give both the same file as DFLOW_SECRET_FILE"
            )
        self.done = True
        return [self._proof(self._role)] if self._role is Role.LISTENER else []

    def _proof(self, prover: Role) -> bytes:
        nonces = (self._nonces[Role.CONNECTOR], self._nonces[Role.LISTENER])
        text = covered([_LABEL, prover.value, self._binding, *nonces])
        return hmac.new(self._secret, text, hashlib.sha256).digest()


def covered(fields: Iterable[bytes]) -> bytes:
    """The fields as one string, from which they could be told apart again."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)


def require_long(secret: bytes) -> None:
    """Raise SecurityError for a secret that is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise SecurityError(
            f"the shared secret has {len(secret)} bytes and needs {MIN_SECRET_BYTES}; "
            "make one by `dflow certs secret FILE`"
        )
