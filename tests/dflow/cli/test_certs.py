"""`dflow certs`: the contents of its files, by OpenSSL and by the package that wrote them, and their permissions."""

from __future__ import annotations

import ipaddress
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from dflow.__main__ import main
from dflow.distributed.transport.security.certificates import (
    SKEW,
    KeyPair,
    issue_certificate,
    make_authority,
    self_signed,
)
from dflow.distributed.transport.security.identity import Identity
from dflow.tracing.errors import ConfigError

NOW = datetime.now(UTC)
YEAR = timedelta(days=365)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    assert main(["certs", "init", str(tmp_path / "ca")]) == 0
    return tmp_path / "ca"


def issue(directory: Path, *words: str) -> int:
    return main(["certs", "issue", str(directory), *words])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_certificate_is_for_its_tasks_its_hosts_and_its_owner(directory: Path) -> None:
    hosts = ("Node7.Example.org", "192.0.2.7", "fd00::7")
    words = ["--name", "worker:3", "--name", "status", *(word for host in hosts for word in ("--host", host))]
    assert issue(directory, *words, "--days", "30") == 0
    folder = directory / "worker-3-status"
    assert mode(directory) == mode(folder) == 0o700
    assert mode(directory / "ca.key") == mode(folder / "key.pem") == 0o600
    issued = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["dflow://job/worker/task/3", "dflow://job/status"]
    assert names.get_values_for_type(x509.DNSName) == ["node7.example.org", "localhost"]
    addresses = [ipaddress.ip_address(text) for text in ("192.0.2.7", "fd00::7", "127.0.0.1", "::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses
    key = load_pem_private_key((folder / "key.pem").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.public_key() == issued.public_key()
    authority = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    issued.verify_directly_issued_by(authority)
    purposes = issued.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not issued.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    constraints = authority.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value) == (True, x509.BasicConstraints(ca=True, path_length=0))
    assert issued.not_valid_after_utc - issued.not_valid_before_utc == timedelta(days=30) + SKEW


def test_a_certificate_for_any_host_names_none(directory: Path) -> None:
    assert issue(directory, "--name", "worker", "--any-host") == 0
    issued = x509.load_pem_x509_certificate((directory / "worker" / "cert.pem").read_bytes())
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [type(name) for name in names] == [x509.UniformResourceIdentifier]


def test_nothing_is_overwritten(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (directory / "ca.key").read_bytes()
    assert main(["certs", "init", str(directory)]) == 1
    assert "ca.key is there, and is not overwritten; remove it first" in capsys.readouterr().err
    assert (directory / "ca.key").read_bytes() == before
    assert issue(directory, "--name", "ps:0", "--any-host") == 0
    assert issue(directory, "--name", "ps:0", "--any-host") == 1
    assert "ps-0 is there, and is not overwritten; remove it first" in capsys.readouterr().err


def test_the_user_is_told_what_to_copy_and_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "ca"
    main(["certs", "init", str(directory)])
    said = capsys.readouterr().out
    assert f"keep {directory}/ca.key off the machines of the cluster" in said
    assert f"dflow certs issue {directory} --name worker:0 --host HOST" in said
    issue(directory, "--name", "ps:1", "--host", "10.0.0.5")
    folder = directory / "ps-1"
    said = capsys.readouterr().out
    assert f"copy the folder {folder} to where that runs" in said
    assert f"DFLOW_TLS_CERT={folder}/cert.pem DFLOW_TLS_KEY={folder}/key.pem DFLOW_TLS_CA={folder}/ca.pem" in said


def test_an_authority_whose_key_others_may_read_issues_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "ca.key").chmod(0o640)
    assert issue(directory, "--name", "ps:1", "--any-host") == 1
    assert "may be used by others (its mode is 0640)\n" in capsys.readouterr().err
    assert not (directory / "ps-1").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--name", "worker:x", "--any-host"], "'worker:x' is no task and no job; write a task, such as worker:3"),
        (["--name", "worker:-1", "--any-host"], "'worker:-1' is no task and no job"),
        (["--name", "ps:1", "--host", "*.example.org"], "'*.example.org' is no host"),
        (["--name", "ps:1", "--host", "a b"], "'a b' is no host"),
        (["--name", "ps:1", "--any-host", "--days", "99999"], "would; ask for fewer days"),
    ],
)
def test_what_cannot_be_issued_is_refused(
    directory: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert issue(directory, *words) == 1
    assert text in capsys.readouterr().err


def test_a_certificate_needs_a_host_or_says_any(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        issue(directory, "--name", "ps:1")
    assert "one of the arguments --host --any-host is required" in capsys.readouterr().err


def test_a_secret_is_random_and_for_its_owner_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        assert main(["certs", "secret", str(file)]) == 0
        assert mode(file) == 0o600
        assert len(bytes.fromhex(file.read_text())) == 32
    assert files[0].read_text() != files[1].read_text()
    said = capsys.readouterr()
    assert f"set DFLOW_SECRET_FILE={files[0]}" in said.out
    assert files[0].read_text().strip() not in said.out + said.err
    assert main(["certs", "secret", str(files[0])]) == 1


def test_a_key_is_in_no_repr() -> None:
    pair = self_signed(NOW, YEAR)
    assert "PRIVATE" not in repr(pair)
    assert "PRIVATE" in pair.key.decode()


def test_an_authority_of_another_kind_is_refused() -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    other = ed25519.Ed25519PrivateKey.generate()
    key = other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    authority = KeyPair(make_authority("test", NOW, YEAR).certificate, key)
    with pytest.raises(ValueError, match="not of the kind that `dflow certs init` makes"):
        issue_certificate(authority, [Identity("ps")], [], NOW, YEAR)


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dflow\[security\]'"):
        make_authority("test", NOW, YEAR)
