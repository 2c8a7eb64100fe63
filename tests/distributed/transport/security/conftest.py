"""Fixtures: pairs of connected sockets, plain and secured, and the two policies between machines."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.policy import Secured, SecurityPolicy
from tests.distributed.transport.security.secured_pairs import (
    HERE,
    Connect,
    Ends,
    Sockets,
    dial,
    in_thread,
    outcome,
    policy,
    secret,
    serve,
    two_sockets,
)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        pair = two_sockets()
        made.extend(pair)
        return pair

    yield make
    for sock in made:
        sock.close()


@pytest.fixture
def connect(sockets: Sockets) -> Connect:
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

        serving = in_thread(lambda: secure(lambda: serve(server, two, address), two))
        dialling = in_thread(lambda: secure(lambda: dial(client, one, address), one))
        return Ends(outcome(dialling), outcome(serving))

    return meet


@pytest.fixture(params=["certificates", "secret"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> SecurityPolicy:
    return policy(tmp_path, "any") if request.param == "certificates" else secret(tmp_path)
