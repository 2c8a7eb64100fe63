"""`dflow certs`: files for mutual authentication of the machines of a cluster.

Invariants: no file is overwritten; a private key or secret is created readable only by its owner, and is never printed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dflow.cli.command import Command, add_commands, at_least_one
from dflow.distributed.transport.security.certificates import KeyPair, issue_certificate, make_authority
from dflow.distributed.transport.security.challenge import MIN_SECRET_BYTES
from dflow.distributed.transport.security.identity import parse_identity
from dflow.distributed.transport.security.private_files import read_private

#: Hosts in every certificate that is limited to hosts, for connections of a process to its own machine.
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
#: The certificate, its key and the authority's certificate, in the directory of each issued certificate.
FILES_OF_CERTIFICATE = ("cert.pem", "key.pem", "ca.pem")
_AUTHORITY = "ca.pem"
_AUTHORITY_KEY = "ca.key"


def init_authority(directory: Path, *, days: int) -> str:
    """Make a certificate authority in `directory`; return a message for the user.

    raises  FileExistsError when one exists there; ConfigError when `cryptography` is not installed
    """
    pair = make_authority("dflow cluster", datetime.now(UTC), timedelta(days=days))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(directory / _AUTHORITY_KEY, pair.key, 0o600)
    _write(directory / _AUTHORITY, pair.certificate, 0o644)
    folder = shlex.quote(str(directory))
    return (
        f"made an authority in {directory}, good for {days} days\n"
        f"  next, for each machine: dflow certs issue {folder} --name worker:0 --host HOST\n"
        f"  keep {directory / _AUTHORITY_KEY} off the machines of the cluster: with it anyone can issue certificates"
    )


def issue_to(directory: Path, names: Sequence[str], hosts: Sequence[str], *, days: int) -> str:
    """Issue a certificate by the authority in `directory`, to a new subdirectory; return a message for the user.

    `hosts`  DNS names or IP addresses where it is valid, besides the local host; if empty, it is valid anywhere
    raises   FileExistsError when one of that name exists; FileNotFoundError without an authority; ValueError for a
             malformed name or host; SecurityError when other users can read the authority's key
    """
    identities = [parse_identity(name) for name in names]
    served_at = [*hosts, *_THIS_MACHINE] if hosts else []
    authority = KeyPair((directory / _AUTHORITY).read_bytes(), read_private(directory / _AUTHORITY_KEY))
    pair = issue_certificate(authority, identities, served_at, datetime.now(UTC), timedelta(days=days))
    folder = directory / "-".join(str(identity).replace(":", "-") for identity in identities)
    if folder.exists():
        raise FileExistsError(f"{folder} is there, and is not overwritten; remove it first")
    folder.mkdir(mode=0o700)
    certificate, key, ca = (folder / name for name in FILES_OF_CERTIFICATE)
    _write(key, pair.key, 0o600)
    _write(certificate, pair.certificate, 0o644)
    _write(ca, authority.certificate, 0o644)
    where = f"at {', '.join(hosts)}" if hosts else "anywhere"
    return (
        f"issued a certificate for {', '.join(map(str, identities))} {where}, good for {days} days\n"
        f"  copy the folder {folder} to where that runs, and there, with the path it has then, set\n"
        f"  DFLOW_TLS_CERT={certificate} DFLOW_TLS_KEY={key} DFLOW_TLS_CA={ca}"
    )


def make_secret(path: Path) -> str:
    """Write a new shared secret to `path`; return a message for the user. Raises FileExistsError if the file exists."""
    _write(path, secrets.token_hex(MIN_SECRET_BYTES).encode() + b"\n", 0o600)
    return (
        f"wrote a secret to {path}\n"
        f"  copy it to each machine, readable by its user alone, and there set DFLOW_SECRET_FILE={path}\n"
        "  with it a machine can join under any name; certificates (`dflow certs init`) hold each machine to its name"
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise FileExistsError(f"{path} is there, and is not overwritten; remove it first, or name another") from None
    with os.fdopen(opened, "wb") as file:
        file.write(data)


def _init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where its key and certificate go")
    parser.add_argument("--days", type=at_least_one, default=3650, metavar="N", help="default: 3650")


def _issue_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory that `dflow certs init` wrote")
    parser.add_argument(
        "--name",
        dest="names",
        action="append",
        required=True,
        metavar="NAME",
        help="worker:3 for one task, worker for every task of a job, coordinator, or what a tool calls itself, such as "
        "status; once for each",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="a DNS name or IP address of it that peers use; repeat for several",
    )
    where.add_argument("--any-host", action="store_true", help="wherever it will run, when that is not known")
    parser.add_argument("--days", type=at_least_one, default=365, metavar="N", help="default: 365")


_ACTIONS = (
    Command(
        "init",
        "make an authority that issues certificates",
        _init_options,
        lambda options: print(init_authority(options.directory, days=options.days)),
    ),
    Command(
        "issue",
        "issue a certificate for a task, a job, the coordinator or a tool",
        _issue_options,
        lambda options: print(issue_to(options.directory, options.names, options.hosts, days=options.days)),
    ),
    Command(
        "secret",
        "write a shared secret to a file",
        lambda parser: parser.add_argument("file", type=Path, metavar="FILE", help="the file to make"),
        lambda options: print(make_secret(options.file)),
    ),
)
CERTS = Command(
    "certs",
    "make the certificates, or the secret, that machines of a cluster identify each other with",
    lambda parser: add_commands(parser, "action", _ACTIONS),
    more="; nothing is overwritten.",
)
