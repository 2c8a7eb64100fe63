"""Keys and secrets are read only from files that other users cannot access."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.tracing.errors import SecurityError


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"")
    key.chmod(mode)
    with pytest.raises(SecurityError, match=rf"may be used by others \(its mode is {mode:04o}\)\n  at .*\n  chmod 600"):
        MutualTls(key, key, key)
    with pytest.raises(SecurityError, match="chmod 600"):
        SharedSecret(key)


def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecurityError, match="pipe is not a plain file"):
        SharedSecret(tmp_path / "pipe")
