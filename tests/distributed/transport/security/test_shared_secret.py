"""The shared secret over real sockets: both sides prove it, and nothing else is accepted."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from dflow.distributed.transport.addresses import UnixAddress
from dflow.distributed.transport.security.certificates import self_signed
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.stream import Stream
from dflow.tracing.errors import DeadlineExceeded, DflowError, SecurityError, TransportClosed
from tests.distributed.transport.security.secured_pairs import (
    NOW,
    YEAR,
    Connect,
    Sockets,
    dial,
    in_thread,
    outcome,
    policy,
    receive,
    secret,
    send_all,
    serve,
)


def test_two_who_know_the_secret_speak(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(secret(tmp_path), secret(tmp_path)).secured()
    assert client.identity == server.identity == ""
    send_all(server, b"hello")
    assert receive(client, 5) == b"hello"


def test_a_side_with_another_secret_is_refused_and_told_nothing(tmp_path: Path, connect: Connect) -> None:
    ends = connect(secret(tmp_path, "t" * 64), secret(tmp_path))
    assert isinstance(ends.server, SecurityError)
    assert "does not know the shared secret" in str(ends.server)
    assert isinstance(ends.client, TransportClosed)
    assert "during the challenge; see its log for why: does it know the same shared secret?" in str(ends.client)
    assert "t" * 64 not in str(ends.client)
    assert "s" * 64 not in str(ends.server)


def test_a_side_in_the_middle_is_noticed_by_both(tmp_path: Path, sockets: Sockets) -> None:
    """It speaks TLS with both, and passes on what each says."""
    (client, near), (far, server) = sockets(), sockets()
    ours = secret(tmp_path)
    dialling = in_thread(lambda: dial(ours, client))
    serving = in_thread(lambda: serve(ours, server))
    pair = self_signed(NOW, YEAR)
    (tmp_path / "c").write_bytes(pair.certificate)
    (tmp_path / "k").write_bytes(pair.key)
    to_client, to_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    to_client.load_cert_chain(tmp_path / "c", tmp_path / "k")
    to_server.check_hostname, to_server.verify_mode = False, ssl.CERT_NONE
    with to_client.wrap_socket(near, server_side=True) as left, to_server.wrap_socket(far) as right:
        right.sendall(left.recv(32))
        left.sendall(right.recv(32))
        right.sendall(left.recv(32))
        left.sendall(b"p" * 32)
        for error in (outcome(serving), outcome(dialling)):
            assert isinstance(error, SecurityError)
            assert "or a process in between answers" in str(error)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"has 8 bytes and needs 32; make one by `dflow certs secret FILE`"):
        secret(tmp_path, "password")


def test_a_challenge_that_stalls_or_drips_ends_at_its_deadline(tmp_path: Path, sockets: Sockets) -> None:
    one, two = sockets()
    ours = secret(tmp_path)
    serving = in_thread(lambda: serve(ours, two, timeout_s=0.5))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(one) as dripping:
        dripping.sendall(b"x")
        with pytest.raises(DeadlineExceeded, match="the challenge by the shared secret did not end in time"):
            raise _as_error(outcome(serving))


def _as_error(found: Secured | BaseException) -> BaseException:
    assert isinstance(found, BaseException)
    return found


def test_certificates_and_a_secret_do_not_mix(tmp_path: Path, connect: Connect) -> None:
    ends = connect(secret(tmp_path), policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert isinstance(ends.client, DflowError)
    ends = connect(policy(tmp_path, "worker"), secret(tmp_path))
    assert isinstance(ends.client, SecurityError)


def test_a_unix_socket_of_the_same_user_needs_neither(both: SecurityPolicy) -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        for secured in (dial(both, one, UnixAddress("/x")), serve(both, two, UnixAddress("/x"))):
            assert type(secured.stream) is Stream
            both.may_be_called(secured.identity, "anyone")
