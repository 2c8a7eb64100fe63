"""Connections by TLS: certificates, identities, and the stream of bytes."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.certificates import issue_certificate, self_signed
from dflow.distributed.transport.security.identity import Identity, parse_identity
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.tls_stream import CHUNK_BYTES, MAX_HANDSHAKE_BYTES, TlsStream
from dflow.distributed.transport.stream import Deadline, without
from dflow.tracing.errors import ConfigError, DeadlineExceeded, SecurityError
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
    two_sockets,
)
from tests.distributed.transports import DEADLINE_S
from tests.effort import examples


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


# TLS streams: every byte arrives in order, and every wait ends at its deadline.


@pytest.mark.parametrize("head", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_stalls_ends_at_its_deadline(both: SecurityPolicy, sockets: Sockets, head: bytes) -> None:
    one, two = sockets()
    one.sendall(head)
    with pytest.raises(DeadlineExceeded, match="the TLS handshake did not end in time"):
        serve(both, two, timeout_s=0.05)


def test_a_tls_record_that_drips_is_not_waited_for_longer_than_a_byte(tmp_path: Path, connect: Connect) -> None:
    """Each byte comes in time, and the record never."""
    client, server = connect(policy(tmp_path, "a"), policy(tmp_path, "b")).secured()
    server.stream.set_timeout(0.05)
    assert isinstance(client.stream, TlsStream)
    raw, stop = client.stream._sock, threading.Event()

    def drip() -> None:
        raw.sendall(b"\x17\x03\x03\x40\x00")
        while not stop.wait(0.01):
            with contextlib.suppress(OSError):
                raw.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(BlockingIOError):
        receive(server, 1)
    stop.set()
    thread.join(DEADLINE_S)


def test_a_handshake_takes_no_more_bytes_than_it_may(tmp_path: Path, sockets: Sockets) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: serve(server, two))
    # One message that says it has 64 KiB, in records of one byte.
    record = b"\x16\x03\x01" + struct.pack(">H", 1)
    message = b"\x01" + (1 << 16).to_bytes(3, "big") + bytes(1 << 16)
    with contextlib.suppress(OSError):
        one.sendall(b"".join(record + bytes([byte]) for byte in message))
    error = outcome(serving)
    assert isinstance(error, SecurityError)
    assert f"takes more than {MAX_HANDSHAKE_BYTES} bytes" in str(error)


def test_a_flipped_bit_is_noticed(tmp_path: Path, sockets: Sockets, connect: Connect) -> None:
    client, server = connect(policy(tmp_path, "a"), policy(tmp_path, "b")).secured()
    assert isinstance(client.stream, TlsStream)
    client.stream._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(SecurityError, match="bad record mac"):
        receive(server, 1)


@settings(max_examples=examples(30), deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 5, 16_384, 16_385, CHUNK_BYTES, CHUNK_BYTES + 1, 700_000]), max_size=6),
    now=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_what_is_sent_without_waiting_and_with_comes_whole_and_in_order(sizes: list[int], now: list[bool]) -> None:
    """A socket that is full takes a record in part; what is left of it goes first the next time."""
    (one, two), contexts = two_sockets(), _anonymous_contexts()
    for sock in (one, two):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with one, two:
        client, server = TlsStream(one, contexts[0], is_server=False), TlsStream(two, contexts[1], is_server=True)
        deadline = Deadline.after(DEADLINE_S)
        serving = threading.Thread(target=server.shake_hands, args=(deadline,))
        serving.start()
        client.shake_hands(deadline)
        serving.join(DEADLINE_S)
        for stream in (client, server):
            stream.set_timeout(DEADLINE_S)
        parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
        wanted = b"".join(parts)
        received: list[bytes] = []
        reading = threading.Thread(
            target=lambda: received.append(receive(Secured(server, ""), len(wanted))), daemon=True
        )
        rest = [memoryview(part) for part in parts]
        for waits in now:
            rest = without(rest, 0 if waits else client.send(rest, waits=False))
        reading.start()
        while rest:
            rest = without(rest, client.send(rest))
        reading.join(DEADLINE_S)
        assert received == [wanted]


def test_small_parts_share_a_packet(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(policy(tmp_path, "a"), policy(tmp_path, "b")).secured()
    assert isinstance(client.stream, TlsStream)
    sent = _CountedSends(client.stream._sock)
    client.stream._sock = sent  # type: ignore[assignment]
    parts = [memoryview(part) for part in (b"header", b"message", bytes(20_000))]
    assert client.stream.send(parts) == sum(map(len, parts))
    assert sent.count == 1
    assert receive(server, 20_013) == b"".join(parts)


class _CountedSends:
    """A socket that counts its sends."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self.count = sock, 0

    def send(self, data: memoryview, flags: int) -> int:
        self.count += 1
        return self._sock.send(data, flags)

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)


@functools.cache
def _anonymous_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    import tempfile

    pair = self_signed(NOW, YEAR)
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "c").write_bytes(pair.certificate)
        Path(folder, "k").write_bytes(pair.key)
        server.load_cert_chain(Path(folder, "c"), Path(folder, "k"))
    return client, server
