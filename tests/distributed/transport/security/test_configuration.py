"""The policy of a process, from arguments or the environment, and the files with its keys and secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dflow.cli.certs import init_authority, issue_to, make_secret
from dflow.distributed.transport.security.configuration import choose_security
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SameMachine
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.tracing.errors import ConfigError, SecurityError


def test_without_settings_only_this_machine_connects() -> None:
    assert isinstance(choose_security({}), SameMachine)
    assert isinstance(choose_security({"DFLOW_SECRET_FILE": "", "DFLOW_TLS_KEY": ""}), SameMachine)


def test_the_environment_or_an_argument_names_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    assert isinstance(choose_security({"DFLOW_SECRET_FILE": str(path)}), SharedSecret)
    given = choose_security({"DFLOW_SECRET_FILE": os.devnull}, secret_file=path)
    assert isinstance(given, SharedSecret)


def test_the_environment_or_an_argument_names_the_certificates(tmp_path: Path) -> None:
    init_authority(tmp_path / "ca", days=30)
    issue_to(tmp_path / "ca", ["ps"], [], days=7)
    folder = tmp_path / "ca" / "ps"
    names = {"DFLOW_TLS_CERT": "cert.pem", "DFLOW_TLS_KEY": "key.pem", "DFLOW_TLS_CA": "ca.pem"}
    environment = {name: str(folder / file) for name, file in names.items()}
    assert isinstance(choose_security(environment), MutualTls)
    assert isinstance(choose_security({}, certificates=folder), MutualTls)
    with pytest.raises(ConfigError, match="DFLOW_TLS_KEY and DFLOW_TLS_CA is not set, and certificates take DFLOW_TLS"):
        choose_security({"DFLOW_TLS_CERT": "x"})
    with pytest.raises(ConfigError, match="DFLOW_SECRET_FILE and DFLOW_TLS_CERT are both set; unset one of them"):
        choose_security(environment | {"DFLOW_SECRET_FILE": "x"})
    with pytest.raises(ConfigError, match="are both given; give one of them"):
        choose_security({}, certificates=folder, secret_file=folder)


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
