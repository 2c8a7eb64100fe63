"""Measure the time to send a value from one process to another, beside plain sockets.

A round trip is a call with 4 bytes, answered by 4. A transfer sends an array of N MB from the CPU device of one process
to another, which makes an array on its device and answers. *tls* is TCP under a shared secret. *raw* is as many bytes
over a plain TCP or Unix socket into one reused buffer, and a byte back. All alternatives are interleaved, round by
round; `x raw` is the median of the ratios to the raw TCP socket of the same round, with the 10th and the 90th
percentile.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks._paired import in_turn, median_ratio, options, publish, seconds_per_call
from benchmarks._raw_sockets import receive
from dflow.cli.certs import make_secret
from dflow.distributed.transport.base import Handler, Peer, Responder
from dflow.distributed.transport.link import Limits
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.codec import decode_arrays, encode_array
from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays, Ok
from dflow.distributed.wire.messages.message import Message

WAIT_S = 60.0
CALLS = 200
MEGABYTES = (1, 10, 100)

#: Listening addresses, by transport.
LISTENS = {"tcp": "127.0.0.1:0", "tls": "127.0.0.1:0", "unix": "unix:", "shared memory": "unix:"}


def main() -> None:
    given = options(__doc__, rounds=15)
    with tempfile.TemporaryDirectory() as folder:
        make_secret(Path(folder, "secret"))
        here, there = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(there, folder), daemon=True)
        server.start()
        rows = measured(here.recv(), folder, given.rounds)
        server.terminate()
        server.join()
    publish("transport", rows, as_json=given.json)


def measured(addresses: dict[str, str], folder: str, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each size and transport."""
    peers = {name: reach(name, folder, addresses[name]) for name in LISTENS}
    rows = compared("round trip", partial(round_trips, addresses, peers), rounds)
    for megabytes in MEGABYTES:
        rows += compared(f"{megabytes} MB", partial(transfers, addresses, peers, megabytes * 10**6), rounds)
    return rows


def compared(what: str, ways: Callable[[], dict[str, Callable[[], float]]], rounds: int) -> list[dict[str, Any]]:
    made = ways()
    in_turn(made, 2)
    times = in_turn(made, rounds)
    rows = []
    for name in made:
        ratio, low, high = median_ratio(times[name], times["raw tcp"])
        microseconds = statistics.median(times[name]) * 1e6
        rows.append({"what": what, "way": name, "us": microseconds, "x raw": ratio, "10 %": low, "90 %": high})
    return rows


def round_trips(addresses: dict[str, str], peers: dict[str, Peer]) -> dict[str, Callable[[], float]]:
    ways = {name: partial(seconds_per_call, partial(call, peer), CALLS) for name, peer in peers.items()}
    return raw_ways(addresses, b"4444", CALLS) | ways


def transfers(addresses: dict[str, str], peers: dict[str, Peer], size_bytes: int) -> dict[str, Callable[[], float]]:
    value = jax.block_until_ready(jnp.arange(size_bytes // 4, dtype=jnp.float32))
    times = max(1, 2 * 10**7 // size_bytes)
    ways = {name: partial(seconds_per_call, partial(transfer, peer, value), times) for name, peer in peers.items()}
    return raw_ways(addresses, bytes(encode_array(value)), times) | ways


def raw_ways(addresses: dict[str, str], data: bytes, times: int) -> dict[str, Callable[[], float]]:
    ways: dict[str, Callable[[], float]] = {}
    for name, family in (("raw tcp", socket.AF_INET), ("raw unix", socket.AF_UNIX)):
        sock = socket.socket(family)
        address = addresses[name]
        sock.connect(("127.0.0.1", int(address)) if family == socket.AF_INET else address)
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(len(data).to_bytes(8, "little"))
        ways[name] = partial(seconds_per_call, partial(raw_transfer, sock, data, memoryview(bytearray(1))), times)
    return ways


def raw_transfer(sock: socket.socket, data: bytes, word: memoryview) -> None:
    sock.sendall(data)
    receive(sock, word)


def call(peer: Peer) -> None:
    peer.call(Ok(), b"4444", timeout_s=WAIT_S)


def transfer(peer: Peer, value: jax.Array) -> None:
    peer.call(Arrays((ArrayInfo("float32", tuple(value.shape)),)), encode_array(value), timeout_s=WAIT_S)


def reach(name: str, folder: str, address: str) -> Peer:
    transport = transport_of(name, folder)
    return transport.connect(address, name="client", handler=Handler(), who="server", timeout_s=WAIT_S)


def transport_of(name: str, folder: str) -> SocketTransport:
    limits = Limits() if name == "shared memory" else Limits(shared_bytes=0)
    return SocketTransport(limits, SharedSecret(Path(folder, "secret")) if name == "tls" else None)


class Takes(Handler):
    """Makes an array on the device from every value, and answers calls."""

    def on_call(self, peer: Peer, message: Message, payload: memoryview, responder: Responder) -> None:
        """Answer a value by Ok, and any other call by its own message and payload."""
        if isinstance(message, Arrays):
            [taken] = decode_arrays(message.arrays, payload)
            jax.block_until_ready(jax.device_put(taken, may_alias=True))
            responder.reply(Ok())
        else:
            responder.reply(message, payload)


def serve(pipe: multiprocessing.connection.Connection, folder: str) -> None:
    """Run the other process: listen with every transport, and send the addresses through `pipe`."""
    raw_tcp, raw_unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    raw_unix.bind(str(Path(folder, "raw")))
    raw_unix.listen()
    for listening in (raw_tcp, raw_unix):
        threading.Thread(target=serve_raw, args=(listening,), daemon=True).start()
    listeners = {
        name: transport_of(name, folder).listen(address, name="server", handler=Takes())
        for name, address in LISTENS.items()
    }
    addresses = {name: listener.address for name, listener in listeners.items()}
    pipe.send({**addresses, "raw tcp": str(raw_tcp.getsockname()[1]), "raw unix": str(Path(folder, "raw"))})
    threading.Event().wait()


def serve_raw(listening: socket.socket) -> None:
    """Accept connections for ever; each first sends the size of its messages in bytes."""
    while True:
        sock, _ = listening.accept()
        threading.Thread(target=serve_raw_sizes, args=(sock,), daemon=True).start()


def serve_raw_sizes(sock: socket.socket) -> None:
    size = memoryview(bytearray(8))
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    receive(sock, size)
    buffer = memoryview(bytearray(int.from_bytes(size, "little")))
    while receive(sock, buffer):
        sock.sendall(b"1")


if __name__ == "__main__":
    main()
