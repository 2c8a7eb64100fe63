"""Certificates over real sockets: which are accepted, and which are refused."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.certificates import issue_certificate
from dflow.distributed.transport.security.identity import Identity, parse_identity
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import Secured
from dflow.tracing.errors import ConfigError, SecurityError
from tests.distributed.transport.security.secured_pairs import (
    NOW,
    YEAR,
    Connect,
    Sockets,
    authority,
    in_thread,
    outcome,
    policy,
    receive,
    send_all,
    serve,
)


def test_each_side_learns_the_identities_of_the_others_certificate(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(policy(tmp_path, "worker:3", "status"), policy(tmp_path, "ps")).secured()
    assert server.identity == "dflow://job/worker/task/3 dflow://job/status"
    assert client.identity == "dflow://job/ps"
    send_all(client, b"hello")
    assert receive(server, 5) == b"hello"


@pytest.mark.parametrize(
    ("client", "server"), [("ours", "theirs"), ("theirs", "ours")], ids=["their listener", "their connector"]
)
def test_certificates_of_another_authority_are_refused(
    tmp_path: Path, connect: Connect, client: str, server: str
) -> None:
    ends = connect(policy(tmp_path, "a", by=client, trusts="ours"), policy(tmp_path, "b", by=server, trusts="ours"))
    refusing, refused = (ends.client, ends.server) if server == "theirs" else (ends.server, ends.client)
    assert isinstance(refusing, SecurityError)
    assert "certificate is refused: " in str(refusing)
    assert "that one authority issued by `dflow certs issue`" in str(refusing)
    if isinstance(refused, Secured):  # a connector hears of the refusal when it first receives
        with pytest.raises(SecurityError, match=r"refused this one during TLS: .*alert unknown ca; see its log"):
            receive(refused, 1)
    else:
        assert isinstance(refused, SecurityError)


def test_an_expired_certificate_is_refused(tmp_path: Path, connect: Connect) -> None:
    ends = connect(policy(tmp_path, "old", now=NOW - YEAR - timedelta(hours=2)), policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert "certificate has expired" in str(ends.server)


def test_a_certificate_of_a_task_signs_for_no_one(tmp_path: Path, connect: Connect) -> None:
    """A worker that was broken into cannot issue certificates of its own."""
    broken = issue_certificate(authority("ours"), [parse_identity("worker:3")], (), NOW, YEAR)
    forged = issue_certificate(broken, [parse_identity("coordinator")], (), NOW, timedelta(days=1))
    for name, data in (("cert", forged.certificate + broken.certificate), ("key", forged.key)):
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "ca").write_bytes(authority("ours").certificate)
    forger = MutualTls(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
    ends = connect(forger, policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert "certificate is refused" in str(ends.server)


@pytest.mark.parametrize("host", ["192.0.2.7", "node8.example.org", "::1"])
def test_a_certificate_for_another_host_is_refused(tmp_path: Path, connect: Connect, host: str) -> None:
    server = policy(tmp_path, "ps", hosts=("node7.example.org", "127.0.0.1"))
    ends = connect(policy(tmp_path, "worker"), server, TcpAddress(host, 80))
    assert isinstance(ends.client, SecurityError)
    assert "is for node7.example.org, 127.0.0.1; issue one by" in str(ends.client)
    assert f"--host {host}`" in str(ends.client)


@pytest.mark.parametrize("host", ["Node7.Example.ORG.", "127.0.0.1", "0:0:0:0:0:0:0:1"])
def test_a_certificate_for_the_host_is_taken(tmp_path: Path, connect: Connect, host: str) -> None:
    server = policy(tmp_path, "ps", hosts=("node7.example.org", "127.0.0.1", "::1"))
    connect(policy(tmp_path, "worker"), server, TcpAddress(host, 80)).secured()


def test_a_certificate_for_no_task_is_refused(tmp_path: Path, connect: Connect) -> None:
    stranger = policy(tmp_path, "x")
    pair = issue_certificate(authority("ours"), [Identity("no task")], (), NOW, YEAR)
    (tmp_path / "cert").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    for context in (stranger._client, stranger._server):
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    ends = connect(stranger, policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert "certificate is for no task; issue one by" in str(ends.server)


def speak_plainly(sock: socket.socket) -> None:
    sock.sendall(b"DFLW" + bytes(28))


def speak_tls(sock: socket.socket, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, newest
    with contextlib.suppress(ssl.SSLError), context.wrap_socket(sock):
        pass


@pytest.mark.parametrize(
    ("speak", "text"),
    [
        (speak_tls, "peer did not return a certificate"),
        (partial(speak_tls, newest=ssl.TLSVersion.TLSv1_2), "TLS"),
        (speak_plainly, "both set up with the same kind of security, certificates or a shared secret?"),
    ],
    ids=["no certificate", "older TLS", "no TLS"],
)
def test_a_connector_without_certificate_or_tls_is_refused(
    tmp_path: Path, sockets: Sockets, speak: Callable[[socket.socket], None], text: str
) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: serve(server, two))
    speak(one)
    error = outcome(serving)
    assert isinstance(error, SecurityError)
    assert text in str(error)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    ours = issue_certificate(authority("ours"), [parse_identity("a")], (), NOW, YEAR)
    (tmp_path / "cert").write_bytes(ours.certificate)
    (tmp_path / "key").write_bytes(authority("ours").key)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "ca").write_bytes(authority("ours").certificate)
    with pytest.raises(ConfigError, match=r"cannot be used: KEY_VALUES_MISMATCH\n  at .*\n  give the three files"):
        MutualTls(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")
