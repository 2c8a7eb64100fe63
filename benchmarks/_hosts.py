"""Hosts of a benchmark: processes with network devices and an identity of their own, as those of separate machines.

A host is a set of Linux namespaces (network, mount and process), made by `unshare`. Its boot id differs from the
machine's, so dflow takes the tasks of two hosts for tasks of two machines: they use neither Unix sockets nor shared
memory to reach each other. Its connections keep their congestion window while they are idle, since the connections of
one way to do a step are idle while another way is measured.

Invariant: when the first process of a host ends, the kernel kills the other processes of the host and removes its
devices. The first process ends when the benchmark closes its input, or ends in any way, so a host never outlives it.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from benchmarks._launched import ROOT
from benchmarks._slow_link import open_device

START_S = 10.0
#: Congestion controls in order of preference. Most machines use the first; a namespace may be refused it.
CONGESTION = ("cubic", "reno")
TOOLS = ("unshare", "nsenter", "mount", "ip", "tc")

_BOOT_ID, _TCP = "/proc/sys/kernel/random/boot_id", "/proc/sys/net/ipv4"
_CONGESTION = f"{_TCP}/tcp_congestion_control"
_SEPARATE = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_NAMESPACES = {"net": "net", "mount": "mnt", "pid": "pid_for_children"}
_FIRST_PROCESS = f"""
mount --bind "$0" {_BOOT_ID} && ip link set lo up || exit 1
for congestion in {" ".join(CONGESTION)}; do
  (echo $congestion > {_CONGESTION}) 2>/dev/null && break
done
echo 0 > {_TCP}/tcp_slow_start_after_idle
cat {_CONGESTION}
exec cat
"""


class Host:
    """Host `number` with its address in the network 10.77.0.0/24; a context that ends with its processes.

    raises  OSError when the machine does not permit namespaces
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"10.77.0.{number + 1}"
        boot = folder / f"boot_id_{number}"
        boot.write_text(f"{uuid.uuid4()}\n")
        self._first = subprocess.Popen(
            ["unshare", *_SEPARATE, "sh", "-c", _FIRST_PROCESS, str(boot)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the benchmark alone, which ends its hosts
        )
        self._started: list[subprocess.Popen[str]] = []
        assert self._first.stdout is not None
        ready, _, _ = select.select([self._first.stdout], [], [], START_S)
        #: The host's TCP congestion control.
        self.congestion = self._first.stdout.readline().strip() if ready else ""
        if not self.congestion:
            self._first.kill()
            _, error = self._first.communicate()
            raise OSError(f"namespaces are not permitted: {error.strip() or 'no answer'}")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._first.stdin is not None
        self._first.stdin.close()
        try:
            self._first.wait(START_S)
        except subprocess.TimeoutExpired:
            self._first.kill()  # `--kill-child` then ends the first process
            self._first.wait(START_S)
        for process in self._started:
            process.wait(START_S)

    @property
    def pid(self) -> int:
        """The process whose network namespace is that of this host."""
        return self._first.pid

    def start(self, *words: str, output: int | IO[str], **environment: str) -> subprocess.Popen[str]:
        """Start Python with these arguments on this host."""
        spaces = [f"--{kind}=/proc/{self.pid}/ns/{name}" for kind, name in _NAMESPACES.items()]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}
        process = subprocess.Popen(
            ["nsenter", *spaces, sys.executable, *words],
            env={**inherited, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def configure(self, *words: str) -> str:
        """Run a command in the host's network namespace; return its output."""
        return _checked("nsenter", f"--net=/proc/{self.pid}/ns/net", *words)

    def use(self, device: str, mtu: int) -> None:
        """Give the host's device the host's address, and start it."""
        self.configure("ip", "address", "add", f"{self.address}/24", "dev", device)
        # A queue too short for a burst of a whole window would drop packets that the link should carry.
        self.configure("ip", "link", "set", device, "mtu", str(mtu), "txqueuelen", "20000", "up")


def connect_at_rate(one: Host, other: Host, gigabits: float) -> None:
    """Connect two hosts by a link of `gigabits` Gbit/s in each direction, with packets of 1,500 bytes."""
    device = "cable"
    ends = ["netns", str(one.pid), "type", "veth", "peer", "name", device, "netns", str(other.pid)]
    _checked("ip", "link", "add", device, *ends)
    burst_bytes = int(max(gigabits * 1e9 / 8 * 0.001, 128 << 10))  # what the rate gives in 1 ms
    for host in (one, other):
        host.use(device, 1500)
        limit = ["tbf", "rate", f"{gigabits:g}gbit", "burst", str(burst_bytes), "latency", "20ms"]
        host.configure("tc", "qdisc", "add", "dev", device, "root", *limit)


def why_not(folder: Path) -> str:
    """Return why this machine has no hosts and links for a benchmark; empty if it has."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(open_device()[0])
        with Host(0, folder) as one, Host(1, folder) as other:
            connect_at_rate(one, other, 1)
    except OSError as error:
        return str(error)
    return ""


def move(device: str, host: Host) -> None:
    """Move a network device of this machine to a host."""
    _checked("ip", "link", "set", device, "netns", str(host.pid))


def dropped(hosts: Sequence[Host], device: str) -> int:
    """Return the number of packets that the queues of the hosts' devices have dropped."""
    found = 0
    for host in hosts:
        for line in host.configure("cat", "/proc/net/dev").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == device:
                found += int(numbers.split()[11])
    return found


def _checked(*words: str) -> str:
    """Run a command and return its output; raises OSError with its error message."""
    ran = subprocess.run(words, capture_output=True, text=True, timeout=START_S, check=False)
    if ran.returncode:
        raise OSError(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout
