"""A link between hosts that delays each packet and loses some: `python -m benchmarks._slow_link HOSTS CONTROL`.

The kernel's own means for this, `netem`, is absent from many kernels. Here each host has a TUN device, and this process
passes the packets of all of them on: a packet for 10.77.0.N goes to host N - 1, `delay_s` after it was read, or is lost
with the probability `loss`. Datagrams at the Unix socket CONTROL change both. The process ends with its input, and then
prints how many packets it passed on and how late, in addition to the delay.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

#: Most bytes of a packet: the jumbo frames of many data centres. Smaller ones would occupy this process more.
MTU = 9000

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
#: Position of the last byte of an IPv4 packet's destination.
_TO = 19
_BATCH = 64


class Control:
    """Changes the delay and the loss of the link at `path`."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.connect(str(path))

    def set(self, delay_s: float, loss: float) -> None:
        """Apply to the packets that are sent from now on."""
        self._sock.send(json.dumps([delay_s, loss]).encode())


def main() -> None:
    count, path = int(sys.argv[1]), sys.argv[2]
    with contextlib.suppress(PermissionError):  # packets should not wait for the processor while tasks compute
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(path)
    opened = [open_device() for _ in range(count)]
    print(json.dumps([name for _, name in opened]), flush=True)
    late_s = forward([file for file, _ in opened], control)
    late_s.sort()
    late_us = [1e6 * late_s[int(len(late_s) * part)] if late_s else 0.0 for part in (0.5, 0.99)]
    with contextlib.suppress(BrokenPipeError):  # the benchmark was killed
        print(json.dumps({"packets": len(late_s), "late us": late_us}), flush=True)


def open_device() -> tuple[int, str]:
    """Return a new TUN device: the file of its packets, and its name."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"dflow%d", _IFF_TUN | _IFF_NO_PI))
    return file, made[:16].rstrip(b"\0").decode()


def forward(files: list[int], control: socket.socket) -> list[float]:
    """Pass packets on until the input ends; return how late each one was, in s."""
    delay_s, loss, chance = 0.0, 0.0, random.Random(0)
    #: The packets on their way, with the time when each one arrives.
    waiting: deque[tuple[float, int, bytes]] = deque()
    late_s: list[float] = []
    while True:
        patience_s = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready, _, _ = select.select([*files, control, sys.stdin], [], [], patience_s)
        if sys.stdin in ready:
            return late_s
        if control in ready:
            delay_s, loss = json.loads(control.recv(256))
        for file in files:
            if file not in ready:
                continue
            arrives = time.monotonic() + delay_s
            if waiting:
                arrives = max(arrives, waiting[-1][0])  # packets never overtake each other
            for _ in range(_BATCH):
                try:
                    packet = os.read(file, MTU)
                except BlockingIOError:
                    break
                to = packet[_TO] - 1 if packet[0] >> 4 == 4 else -1
                if 0 <= to < len(files) and chance.random() >= loss:
                    waiting.append((arrives, files[to], packet))
        while waiting and waiting[0][0] <= (now := time.monotonic()):
            arrives, file, packet = waiting.popleft()
            late_s.append(now - arrives)
            try:
                os.write(file, packet)
            except OSError:  # the host is ending
                continue


if __name__ == "__main__":
    main()
