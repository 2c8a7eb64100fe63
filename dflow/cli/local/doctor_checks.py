"""The checks of `dflow doctor`. Each looks at one thing of this machine and returns what it found; none imports JAX."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from dflow import __version__
from dflow.cli.tables import size_text
from dflow.distributed.transport.loopback import LOOPBACK

#: Open files of a process of a cluster: a socket to each peer, logs, programs. dflow raises the soft limit itself.
FEWEST_FILES = 1024
#: Memory that JAX needs to compile a small program, with some for the program, in bytes.
LEAST_MEMORY = 1_000_000_000
#: Longest wait for the resolution of this host's name, in s.
RESOLVE_S = 5.0
#: Extras for work on dflow itself, which its users do not miss.
OF_DEVELOPERS = {"dev", "integrations", "jax-suite", "plots", "site"}
_DEVICES = """
import json, jax
print(json.dumps([f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()]))
"""


@dataclass(frozen=True)
class Diagnosis:
    """What a check found; `remedy` is empty if `level` is *ok*.

    `level`  *wrong* if dflow does not work like this; *note* if some uses of it do not
    """

    level: Literal["ok", "note", "wrong"]
    text: str
    remedy: str = ""


def versions() -> Iterator[Diagnosis]:
    """Yield the versions of Python, dflow and the packages that it requires, each compared with the requirement."""
    series = sys.version_info[:2]
    text = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        yield Diagnosis("wrong", f"{text}: expected Linux", "run dflow on Linux, or in a container of it")
    elif series < (3, 11):
        yield Diagnosis("wrong", f"{text}: expected Python 3.11 or newer", "install a newer Python")
    else:
        yield Diagnosis("ok", text)
    try:
        required = metadata.requires("dflow") or []
    except metadata.PackageNotFoundError:
        yield Diagnosis(
            "note", f"dflow {__version__} runs without being installed", "pip install it to compare versions"
        )
        return
    yield Diagnosis("ok", f"dflow {__version__}")
    for requirement in required:
        if "extra ==" not in requirement:
            yield _compared(requirement)


def _compared(requirement: str) -> Diagnosis:
    name, specifiers = _parsed(requirement)
    wanted = f"pip install '{name}{specifiers}'"
    if (installed := _installed(name)) is None:
        return Diagnosis("wrong", f"{name} is not installed", wanted)
    if not fits(installed, specifiers):
        return Diagnosis("wrong", f"{name} {installed}: expected {specifiers}", wanted)
    return Diagnosis("ok", f"{name} {installed}")


def _parsed(requirement: str) -> tuple[str, str]:
    """Return the name and the version specifiers of a requirement, without extras and markers."""
    name, specifiers = re.fullmatch(r"([\w.-]+)(?:\[.*?\])?\s*\(?([^;)]*)\)?.*", requirement).groups()  # type: ignore[union-attr]
    return name, specifiers.replace(" ", "")


def fits(version: str, specifiers: str) -> bool:
    """Whether a version fits specifiers of the form `>=A,<B`, by the numbers at its beginning."""

    def numbers(text: str) -> tuple[int, ...]:
        found = re.match(r"\d+(\.\d+)*", text)
        return tuple(int(part) for part in found[0].split(".")) if found else ()

    compare = {">=": lambda a, b: a >= b, "<": lambda a, b: a < b}
    pairs = [re.match(r"(>=|<)(.*)", each) for each in filter(None, specifiers.split(","))]
    return all(compare[pair[1]](numbers(version), numbers(pair[2])) for pair in pairs if pair)


def extras() -> Iterator[Diagnosis]:
    """Yield each extra whose packages are not all installed, with the command that installs it."""
    try:
        required = metadata.requires("dflow") or []
    except metadata.PackageNotFoundError:
        return
    missing: dict[str, list[str]] = {}
    for requirement in required:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if extra and extra[1] not in OF_DEVELOPERS and _installed(_parsed(requirement)[0]) is None:
            missing.setdefault(extra[1], []).append(_parsed(requirement)[0])
    for name, packages in sorted(missing.items()):
        yield Diagnosis("note", f"extra {name}: without {', '.join(packages)}", f"pip install 'dflow[{name}]'")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices(timeout_s: float) -> Iterator[Diagnosis]:
    """Yield the devices that JAX finds, in a process that gets `timeout_s` seconds."""
    chosen = os.environ.get("JAX_PLATFORMS", "")
    where = f"JAX_PLATFORMS={chosen}" if chosen else "JAX_PLATFORMS is not set"
    on_cpu = "set JAX_PLATFORMS=cpu to do without them"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"devices: JAX did not list them within {timeout_s:g} s ({where})"
        yield Diagnosis("wrong", text, f"end other processes that use them, give a longer --timeout, or {on_cpu}")
        return
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        if last == "AssertionError":  # of JAX, for a platform that it knows and that is not here
            last = "there is no device of this platform, or no plugin of JAX for it"
        remedy = f"install JAX's plugin for the platform, such as pip install 'jax[cuda12]', or {on_cpu}"
        yield Diagnosis("wrong", f"devices: JAX fails ({where}): {last}", remedy)
        return
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    text = f"devices: {', '.join(found)} ({where})"
    if not chosen and all(each.startswith("cpu:") for each in found) and shutil.which("nvidia-smi"):
        yield Diagnosis("note", f"{text}, and this machine has nvidia-smi", "pip install 'jax[cuda12]' to use its GPUs")
    else:
        yield Diagnosis("ok", text)


def limits() -> Iterator[Diagnosis]:
    """Yield cores, memory, open files and shared memory of a process."""
    cores = len(os.sched_getaffinity(0))
    yield Diagnosis("ok", f"cores: {cores} of {os.cpu_count()}")
    free = _available_memory()
    text = f"memory: {size_text(free or 0)} available"
    if free is None:
        remedy = f"see that dflow can use {size_text(LEAST_MEMORY)}, or mount /proc in this container"
        yield Diagnosis("note", "memory: /proc/meminfo does not tell how much is available", remedy)
    elif free < LEAST_MEMORY:
        need = f"{text}: expected at least {size_text(LEAST_MEMORY)}"
        yield Diagnosis("wrong", need, "end other processes, or raise the limit of this container")
    else:
        yield Diagnosis("ok", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    text = f"open files: at most {soft}, raised up to {most} when needed"
    if hard != resource.RLIM_INFINITY and hard < FEWEST_FILES:
        yield Diagnosis("wrong", f"{text}: expected at least {FEWEST_FILES}", "raise the hard limit: ulimit -Hn 65536")
    else:
        yield Diagnosis("ok", text)
    try:
        descriptor = os.memfd_create("dflow-doctor", os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, bytes(1 << 20))
        finally:
            os.close(descriptor)
    except OSError as error:
        remedy = "allow memfd_create in this container; large values go through sockets until then"
        yield Diagnosis("note", f"shared memory between processes: {error.strerror}", remedy)
    else:
        yield Diagnosis("ok", "shared memory between processes: works")


def _available_memory() -> int | None:
    """Return the bytes that a new process can use: of this machine, and of this container if it has a limit.

    None if the kernel does not tell.
    """
    try:
        free = _number("MemAvailable:", Path("/proc/meminfo")) * 1024
    except (OSError, ValueError):
        return None
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / file).read_text()) for file in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no limit, or an older kernel
        return free
    try:
        cache = _number("inactive_file", folder / "memory.stat")  # is in use, and freed when a process needs it
    except (OSError, ValueError):
        cache = 0
    return min(free, limit - used + cache)


def _number(name: str, file: Path) -> int:
    """Return the number after a name at the start of a line. Raises ValueError without one."""
    found = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1] if found else "")


def network() -> Iterator[Diagnosis]:
    """Yield whether processes of this machine reach each other, and whether its name can be resolved."""
    family = socket.AF_INET6 if ":" in LOOPBACK else socket.AF_INET
    try:
        with socket.create_server((LOOPBACK, 0), family=family) as server:
            server.settimeout(RESOLVE_S)
            socket.create_connection(server.getsockname()[:2], timeout=RESOLVE_S).close()
    except OSError as error:
        yield Diagnosis("wrong", f"loopback: {error}", f"allow connections to {LOOPBACK}, and start interface lo")
    else:
        yield Diagnosis("ok", "loopback: connects")
    name, found = socket.gethostname(), list[str]()

    def resolve() -> None:
        try:
            found.append(socket.gethostbyname(name))
        except OSError as error:
            found.append(f"? {error.strerror}")

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    address = found[0] if found else f"? no answer within {RESOLVE_S:g} s"
    if address.startswith("?"):
        remedy = f"add {name} to /etc/hosts, or give addresses instead of names to clusters of several machines"
        yield Diagnosis("note", f"host name {name}: {address.removeprefix('? ')}", remedy)
    else:
        yield Diagnosis("ok", f"host name {name}: {address}")


def clock() -> Iterator[Diagnosis]:
    """Yield whether the clock is right by some hours: it must not show a time before dflow's files were written."""
    now, written = time.time(), Path(__file__).stat().st_mtime
    text = f"clock: {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(now))}"
    if now < written - 86_400:
        remedy = "set the clock; certificates are refused as not yet valid until then"
        yield Diagnosis("wrong", f"{text}, before dflow was installed", remedy)
    else:
        yield Diagnosis("ok", text)
