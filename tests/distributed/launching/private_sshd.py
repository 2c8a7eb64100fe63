"""An sshd of a test on loopback, with separate keys and configuration; for its clients all hosts are this one."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.distributed.waiting import until

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
IS_HERE = bool(SSHD and shutil.which("ssh") and shutil.which("ssh-keygen"))
ROOT = Path(__file__).parents[3]


class PrivateSshd:
    """The words of the command `ssh` that reaches it, and an interpreter that imports this dflow there."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.ssh = ["ssh", "-F", str(folder / "ssh_config")]
        self.python = folder / "python"
        for key in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host_key.pub').read_text()}")
        (folder / "sshd_config").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nPasswordAuthentication no\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        )
        passed = {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS") if name in os.environ}
        passed["PYTHONPATH"] = f"{ROOT}:{os.environ['PYTHONPATH']}"
        exports = "".join(f"export {name}='{value}'\n" for name, value in passed.items())
        self.python.write_text(f'#!/bin/sh\n{exports}exec {sys.executable} "$@"\n')
        self.python.chmod(0o700)


@contextmanager
def private_sshd(folder: Path) -> Iterator[PrivateSshd]:
    if os.geteuid() == 0:  # as root it wants this folder, which a package's service makes
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    made = PrivateSshd(folder, port)
    words = [SSHD or "", "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("w") as log, subprocess.Popen(words, stderr=log) as server:
        try:
            until(lambda: server.poll() is not None or "listening" in (folder / "sshd.log").read_text())
            assert server.poll() is None, (folder / "sshd.log").read_text()
            yield made
        finally:
            server.terminate()
