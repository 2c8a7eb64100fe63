"""Mutual proof that both sides of a connection know a shared secret, without sending it.

Why: a shared secret is one file to copy, while certificates are one for each machine. The challenge runs inside a TLS
connection whose certificate no authority has signed, so a proof must be invalid on any other connection. It covers the
certificate that the listener showed; a man in the middle cannot show that certificate, as it lacks the key. All later
messages on the connection, names included, come from a peer that knows the secret.

Each side sends a nonce, the connector first. The connector then sends the first proof, so an unauthenticated connector
never gets the listener's. A proof is HMAC-SHA256, keyed by the secret, over the prover's role, the binding (the SHA-256
of the listener's certificate) and both nonces, each preceded by its length.

Invariants: a side believes the other only after its valid proof. No error contains the secret or a proof.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable

from dflow.tracing.errors import SecurityError

#: Size of each message of the challenge, a nonce or a proof.
MESSAGE_BYTES = 32
#: Least size of a secret, which must be random: an attacker dialled by a connector can test guesses on its proof.
MIN_SECRET_BYTES = 32

_LABEL = b"dflow shared secret, 1"


def challenge(
    secret: bytes,
    nonce: bytes,
    binding: bytes,
    *,
    is_listener: bool,
    send: Callable[[bytes], None],
    receive: Callable[[], bytes],
) -> None:
    """Prove the secret to the other side, and return when that has proved it; raises SecurityError if it does not.

    `nonce`    `MESSAGE_BYTES` random bytes, never used before
    `binding`  the bytes that both ends of this connection share and no other connection has
    `receive`  returns the other side's next `MESSAGE_BYTES` bytes
    """
    if not is_listener:
        send(nonce)
    theirs = receive()
    if theirs == nonce:
        raise SecurityError("the other side sent this side's own nonce back")
    nonces = (theirs, nonce) if is_listener else (nonce, theirs)
    own, other = (
        hmac.digest(secret, covered([_LABEL, role, binding, *nonces]), "sha256")
        for role in ((b"listener", b"connector") if is_listener else (b"connector", b"listener"))
    )
    send(nonce if is_listener else own)
    if not hmac.compare_digest(receive(), other):
        raise SecurityError(
            "the other side does not know the shared secret, or a process in between answers; "
            "give both the same file as DFLOW_SECRET_FILE"
        )
    if is_listener:
        send(own)


def covered(fields: Iterable[bytes]) -> bytes:
    """Join the fields, each after its length, so that different fields never give the same bytes."""
    return b"".join(len(field).to_bytes(4, "big") + field for field in fields)
