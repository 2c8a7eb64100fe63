"""What holds for every policy, and between two different ones."""

from __future__ import annotations

import socket
from pathlib import Path

from dflow.distributed.transport.addresses import UnixAddress
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.stream import Stream
from dflow.tracing.errors import DflowError, SecurityError
from tests.distributed.transport.security.secured_pairs import (
    Connect,
    dial,
    policy,
    secret,
    serve,
)


def test_certificates_and_a_secret_do_not_mix(tmp_path: Path, connect: Connect) -> None:
    ends = connect(secret(tmp_path), policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert isinstance(ends.client, DflowError)
    ends = connect(policy(tmp_path, "worker"), secret(tmp_path))
    assert isinstance(ends.client, SecurityError)


def test_a_unix_socket_of_the_same_user_needs_neither(both: SecurityPolicy) -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        for secured in (
            dial(both, one, UnixAddress("/x")),
            serve(both, two, UnixAddress("/x")),
        ):
            assert type(secured.stream) is Stream
            both.may_be_called(secured.identity, "anyone")
