"""Measure the processor time of certificates and of a shared secret.

Both ends are in this process, so its processor time covers both; the figures are the least of several rounds with the
alternatives interleaved. *connect* is a new connection until both sides are authenticated, *round trip* a call with 4
bytes and its answer, *100 MB* a payload of 100 MB and a short answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks._paired import in_turn, options, publish
from dflow.cli.certs import make_secret
from dflow.distributed.transport.base import Handler, Listener, Peer, Responder
from dflow.distributed.transport.link import Limits
from dflow.distributed.transport.security.certificates import issue_certificate, make_authority
from dflow.distributed.transport.security.identity import Identity
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message

WAIT_S = 60.0
LARGE = bytes(100_000_000)


def main() -> None:
    given = options(__doc__, rounds=7)
    with TemporaryDirectory() as folder:
        policies = {"plain": None, "certificates": certificates(Path(folder)), "secret": secret(Path(folder))}
    transports = {name: SocketTransport(Limits(shared_bytes=0), policy) for name, policy in policies.items()}
    listeners = {
        name: each.listen("127.0.0.1:0", name="server", handler=Answers()) for name, each in transports.items()
    }
    dials = {name: partial(dial, transports[name], listeners[name].address) for name in transports}
    peers = {name: connect() for name, connect in dials.items()}
    connects = {name: partial(connected, connect) for name, connect in dials.items()}
    trips = {name: partial(ask, peer, b"4444") for name, peer in peers.items()}
    transfers = {name: partial(ask, peer, LARGE) for name, peer in peers.items()}
    rows = [
        row("connect, ms", connects, 1e3, 20, given.rounds),
        row("round trip, us", trips, 1e6, 300, given.rounds),
        row("100 MB, ms", transfers, 1e3, 1, given.rounds),
    ]
    for listener in listeners.values():
        listener.close()
    publish("tls", rows, as_json=given.json)


def row(what: str, ways: dict[str, Callable[[], None]], unit: float, times: int, rounds: int) -> dict[str, Any]:
    timed = {name: partial(processor_seconds, way, times) for name, way in ways.items()}
    in_turn(timed, 1)
    found = in_turn(timed, rounds)
    return {"what": what} | {name: min(took) * unit for name, took in found.items()}


def processor_seconds(way: Callable[[], None], times: int) -> float:
    """Return the processor time of one run of `way` in this process, averaged over `times` runs."""
    started = time.process_time()
    for _ in range(times):
        way()
    return (time.process_time() - started) / times


def listen(transport: SocketTransport) -> Listener:
    return transport.listen("127.0.0.1:0", name="server", handler=Answers())


def dial(transport: SocketTransport, address: str) -> Peer:
    return transport.connect(address, name="client", handler=Handler(), who="server", timeout_s=WAIT_S)


def connected(connect: Callable[[], Peer]) -> None:
    connect().close()


def ask(peer: Peer, payload: bytes) -> None:
    peer.call(Ok(), payload, timeout_s=WAIT_S)


class Answers(Handler):
    """Answers every call with four bytes."""

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Answer."""
        responder.reply(Ok(), b"4444")


def certificates(folder: Path) -> SecurityPolicy:
    now, day = datetime.now(UTC), timedelta(days=1)
    authority = make_authority("benchmark", now, 2 * day)
    pair = issue_certificate(authority, [Identity("server"), Identity("client")], [], now, day)
    for name, data in (("cert.pem", pair.certificate), ("key.pem", pair.key), ("ca.pem", authority.certificate)):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return MutualTls.in_folder(folder)


def secret(folder: Path) -> SecurityPolicy:
    make_secret(folder / "secret")
    return SharedSecret(folder / "secret")


if __name__ == "__main__":
    main()
