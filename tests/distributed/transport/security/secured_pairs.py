"""Policies, and pairs of sockets secured by them, for the tests of security."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dflow.distributed.transport.addresses import Address, TcpAddress
from dflow.distributed.transport.security.certificates import KeyPair, issue_certificate, make_authority
from dflow.distributed.transport.security.identity import parse_identity
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.distributed.transport.stream import Deadline, without
from tests.distributed.transports import DEADLINE_S

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


def serve(
    policy: SecurityPolicy, sock: socket.socket, address: Address = HERE, *, timeout_s: float = DEADLINE_S
) -> Secured:
    return policy.secure(sock, address, Deadline.after(timeout_s), is_server=True)


def dial(policy: SecurityPolicy, sock: socket.socket, address: Address = HERE) -> Secured:
    return policy.secure(sock, address, Deadline.after(DEADLINE_S), is_server=False)


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
Sockets = Callable[[], tuple[socket.socket, socket.socket]]


def two_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname(), DEADLINE_S)
        server, _ = listening.accept()
    client.settimeout(None)
    return client, server


def send_all(secured: Secured, data: bytes) -> None:
    rest = [memoryview(data)]
    while rest:
        rest = without(rest, secured.stream.send(rest))


def receive(secured: Secured, size: int) -> bytes:
    data = bytearray(size)
    filled = 0
    while filled < size:
        count = secured.stream.receive(memoryview(data)[filled:])
        assert count
        filled += count
    return bytes(data)
