"""Certificates and shared secrets over real sockets: who is let in, who is not, and that bytes come through."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.transport.addresses import TcpAddress, UnixAddress
from dflow.distributed.transport.certificates import KeyPair, issue_certificate, make_authority, self_signed
from dflow.distributed.transport.identity import parse_identity
from dflow.distributed.transport.security import Secured, SecurityPolicy
from dflow.distributed.transport.stream import SocketStream, without
from dflow.distributed.transport.tls_policies import MutualTls, SharedSecret
from dflow.distributed.transport.tls_stream import CHUNK_BYTES, MAX_HANDSHAKE_BYTES, TlsStream
from dflow.tracing.errors import ConfigError, DeadlineExceeded, DflowError, SecurityError, TransportClosed
from tests.distributed.transports import DEADLINE_S
from tests.effort import examples

NOW = datetime.now(UTC)
YEAR = timedelta(days=365)
HERE = TcpAddress("127.0.0.1", 1)


@functools.cache
def authority(name: str) -> KeyPair:
    return make_authority(name, NOW - YEAR, 3 * YEAR)


def policy(
    folder: Path, *names: str, hosts: tuple[str, ...] = (), by: str = "ours", now: datetime = NOW, trusts: str = ""
) -> MutualTls:
    """A policy with a certificate that `by` issued and that trusts `trusts`."""
    pair = issue_certificate(authority(by), [parse_identity(name) for name in names], hosts, now, YEAR)
    place = folder / f"{'-'.join(names)} {by} {len(list(folder.iterdir()))}"
    place.mkdir()
    for name, data in (("cert", pair.certificate), ("key", pair.key), ("ca", authority(trusts or by).certificate)):
        (place / name).write_bytes(data)
        (place / name).chmod(0o600)
    return MutualTls(place / "cert", place / "key", place / "ca")


def secret(folder: Path, text: str = "s" * 64) -> SharedSecret:
    file = folder / f"secret {len(list(folder.iterdir()))}"
    file.write_text(text + "\n")
    file.chmod(0o600)
    return SharedSecret(file)


@dataclass(frozen=True)
class Ends:
    """What each side made of the connection."""

    client: Secured | BaseException
    server: Secured | BaseException

    def secured(self) -> tuple[Secured, Secured]:
        for end in (self.client, self.server):
            if isinstance(end, BaseException):
                raise end
        assert isinstance(self.client, Secured)
        assert isinstance(self.server, Secured)
        return self.client, self.server


def in_thread(work: Callable[[], Secured]) -> Future[Secured]:
    future: Future[Secured] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def outcome(future: Future[Secured]) -> Secured | BaseException:
    return future.exception(DEADLINE_S) or future.result()


Connect = Callable[..., Ends]


def two_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname(), DEADLINE_S)
        server, _ = listening.accept()
    client.settimeout(None)
    return client, server


@pytest.fixture
def sockets() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    made: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        pair = two_sockets()
        made.extend(pair)
        return pair

    yield make
    for sock in made:
        sock.close()


@pytest.fixture
def connect(sockets: Callable[[], tuple[socket.socket, socket.socket]]) -> Connect:
    """Let two policies meet; the side that refuses closes its socket, as the transport does."""

    def meet(client: SecurityPolicy, server: SecurityPolicy, address: TcpAddress = HERE) -> Ends:
        one, two = sockets()

        def secure(act: Callable[[], Secured], sock: socket.socket) -> Secured:
            try:
                return act()
            except BaseException:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                raise

        serving = in_thread(lambda: secure(lambda: server.secure_server(two, address, DEADLINE_S), two))
        dialling = in_thread(lambda: secure(lambda: client.secure_client(one, address, DEADLINE_S), one))
        return Ends(outcome(dialling), outcome(serving))

    return meet


def send_all(secured: Secured, data: bytes) -> None:
    rest = [memoryview(data)]
    while rest:
        rest = without(rest, secured.stream.send(rest))


def receive(secured: Secured, size: int) -> bytes:
    data = bytearray(size)
    filled = 0
    while filled < size:
        count = secured.stream.receive_into(memoryview(data)[filled:])
        assert count
        filled += count
    return bytes(data)


# Certificates.


def test_each_learns_for_whom_the_others_certificate_is(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(policy(tmp_path, "worker:3", "status"), policy(tmp_path, "ps")).secured()
    assert server.identity == "dflow://job/worker/task/3 dflow://job/status"
    assert client.identity == "dflow://job/ps"
    send_all(client, b"hello")
    assert receive(server, 5) == b"hello"


def test_a_side_may_be_called_what_its_certificate_says_and_nothing_else(tmp_path: Path) -> None:
    ours = policy(tmp_path, "ps")
    ours.may_be_called("dflow://job/worker/task/3", "/job:worker/task:3")
    with pytest.raises(SecurityError, match=r"calls itself '/job:worker/task:2', but its certificate is for worker:3"):
        ours.may_be_called("dflow://job/worker/task/3", "/job:worker/task:2")


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
    pair = _without_names(authority("ours"))
    (tmp_path / "cert").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    for context in (stranger._client, stranger._server):
        context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    ends = connect(stranger, policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert "certificate is for no task; issue one by" in str(ends.server)


def _without_names(issuer: KeyPair) -> KeyPair:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    signer = load_pem_private_key(issuer.key, None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issued_by = x509.load_pem_x509_certificate(issuer.certificate).subject
    builder = x509.CertificateBuilder(issued_by, name, key.public_key(), 1, NOW - YEAR, NOW + YEAR)
    data = builder.sign(signer, hashes.SHA256()).public_bytes(Encoding.PEM)
    return KeyPair(data, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_a_connector_without_a_certificate_is_refused(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: server.secure_server(two, HERE, DEADLINE_S))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(one):
        error = outcome(serving)
    assert isinstance(error, SecurityError)
    assert "peer did not return a certificate" in str(error)


def test_older_tls_is_refused(tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: server.secure_server(two, HERE, DEADLINE_S))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="alert protocol version"):
        context.wrap_socket(one)
    assert isinstance(outcome(serving), SecurityError)


def test_plain_bytes_are_refused_and_the_remedy_is_said(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: server.secure_server(two, HERE, DEADLINE_S))
    one.sendall(b"DFLW" + bytes(28))
    error = outcome(serving)
    assert isinstance(error, SecurityError)
    assert "are both set up with the same kind of security, certificates or a shared secret?" in str(error)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    ours = issue_certificate(authority("ours"), [parse_identity("a")], (), NOW, YEAR)
    (tmp_path / "cert").write_bytes(ours.certificate)
    (tmp_path / "key").write_bytes(authority("ours").key)
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "ca").write_bytes(authority("ours").certificate)
    with pytest.raises(ConfigError, match="cannot be used: KEY_VALUES_MISMATCH\n  give the three files"):
        MutualTls(tmp_path / "cert", tmp_path / "key", tmp_path / "ca")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"")
    key.chmod(mode)
    with pytest.raises(SecurityError, match=rf"may be used by others \(its mode is {mode:04o}\)\n  chmod 600 .*key"):
        MutualTls(key, key, key)
    with pytest.raises(SecurityError, match="chmod 600"):
        SharedSecret(key)


def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecurityError, match="pipe is not a plain file"):
        SharedSecret(tmp_path / "pipe")


# A shared secret.


def test_two_who_know_the_secret_speak(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(secret(tmp_path), secret(tmp_path)).secured()
    assert client.identity == server.identity == ""
    send_all(server, b"hello")
    assert receive(client, 5) == b"hello"


def test_one_who_knows_another_secret_is_refused_and_told_nothing(tmp_path: Path, connect: Connect) -> None:
    ends = connect(secret(tmp_path, "t" * 64), secret(tmp_path))
    assert isinstance(ends.server, SecurityError)
    assert "does not know the shared secret" in str(ends.server)
    assert isinstance(ends.client, TransportClosed)
    assert "during the challenge; see its log for why: does it know the same shared secret?" in str(ends.client)
    assert "t" * 64 not in str(ends.client)
    assert "s" * 64 not in str(ends.server)


def test_one_in_the_middle_is_noticed_by_both(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    """It speaks TLS with both, and passes on what each says."""
    (client, near), (far, server) = sockets(), sockets()
    ours = secret(tmp_path)
    dialling = in_thread(lambda: ours.secure_client(client, HERE, DEADLINE_S))
    serving = in_thread(lambda: ours.secure_server(server, HERE, DEADLINE_S))
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
            assert "or someone stands in between" in str(error)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecurityError, match=r"has 8 bytes and needs 32; make one by `dflow certs secret FILE`"):
        secret(tmp_path, "password")


def test_certificates_and_a_secret_do_not_mix(tmp_path: Path, connect: Connect) -> None:
    ends = connect(secret(tmp_path), policy(tmp_path, "ps"))
    assert isinstance(ends.server, SecurityError)
    assert isinstance(ends.client, DflowError)
    ends = connect(policy(tmp_path, "worker"), secret(tmp_path))
    assert isinstance(ends.client, SecurityError)


# Both.


@pytest.fixture(params=["certificates", "secret"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> SecurityPolicy:
    return policy(tmp_path, "any") if request.param == "certificates" else secret(tmp_path)


def test_a_unix_socket_of_the_same_user_needs_neither(both: SecurityPolicy) -> None:
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        for secured in (
            both.secure_client(one, UnixAddress("/x"), DEADLINE_S),
            both.secure_server(two, UnixAddress("/x"), DEADLINE_S),
        ):
            assert isinstance(secured.stream, SocketStream)
            both.may_be_called(secured.identity, "anyone")


@pytest.mark.parametrize("head", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_a_handshake_that_stalls_ends_at_its_deadline(
    both: SecurityPolicy, sockets: Callable[[], tuple[socket.socket, socket.socket]], head: bytes
) -> None:
    one, two = sockets()
    one.sendall(head)
    with pytest.raises(DeadlineExceeded, match="the TLS handshake did not end in time"):
        both.secure_server(two, HERE, 0.05)


def test_a_challenge_that_stalls_or_drips_ends_at_its_deadline(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    one, two = sockets()
    ours = secret(tmp_path)
    serving = in_thread(lambda: ours.secure_server(two, HERE, 0.5))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(one) as dripping:
        dripping.sendall(b"x")
        with pytest.raises(DeadlineExceeded, match="the challenge by the shared secret did not end in time"):
            raise _as_error(outcome(serving))


def _as_error(found: Secured | BaseException) -> BaseException:
    assert isinstance(found, BaseException)
    return found


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


def test_a_handshake_takes_no_more_bytes_than_it_may(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]]
) -> None:
    one, two = sockets()
    server = policy(tmp_path, "ps")
    serving = in_thread(lambda: server.secure_server(two, HERE, DEADLINE_S))
    # One message that says it has 64 KiB, in records of one byte.
    record = b"\x16\x03\x01" + struct.pack(">H", 1)
    message = b"\x01" + (1 << 16).to_bytes(3, "big") + bytes(1 << 16)
    with contextlib.suppress(OSError):
        one.sendall(b"".join(record + bytes([byte]) for byte in message))
    error = outcome(serving)
    assert isinstance(error, SecurityError)
    assert f"takes more than {MAX_HANDSHAKE_BYTES} bytes" in str(error)


def test_a_flipped_bit_is_noticed(
    tmp_path: Path, sockets: Callable[[], tuple[socket.socket, socket.socket]], connect: Connect
) -> None:
    client, server = connect(policy(tmp_path, "a"), policy(tmp_path, "b")).secured()
    assert isinstance(client.stream, TlsStream)
    client.stream._sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(SecurityError, match="bad record mac"):
        receive(server, 1)


def test_bytes_go_both_ways_at_once(tmp_path: Path, connect: Connect) -> None:
    client, server = connect(policy(tmp_path, "a"), policy(tmp_path, "b")).secured()
    data = np.random.default_rng(0).integers(0, 256, 8 << 20, dtype=np.uint8).tobytes()
    senders = [threading.Thread(target=send_all, args=(end, data)) for end in (client, server)]
    received: dict[int, bytes] = {}

    def take(number: int, end: Secured) -> None:
        received[number] = receive(end, len(data))

    readers = [threading.Thread(target=take, args=pair) for pair in enumerate((client, server))]
    for thread in (*senders, *readers):
        thread.start()
    for thread in (*senders, *readers):
        thread.join(DEADLINE_S)
    assert received == {0: data, 1: data}


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
        deadline = time.monotonic() + DEADLINE_S
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
            rest = without(rest, 0 if waits else client.send_now(rest))
        reading.start()
        while rest:
            rest = without(rest, client.send(rest))
        reading.join(DEADLINE_S)
        assert received == [wanted]


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
