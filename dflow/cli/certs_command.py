"""Command line of `dflow certs`; the actions are in `certs`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dflow.cli.command import Command, add_commands
from dflow.cli.option_types import at_least_one


def _init_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where its key and certificate go")
    parser.add_argument("--days", type=at_least_one, default=3650, metavar="N", help="default: 3650")


def _init(options: argparse.Namespace) -> int:
    from dflow.cli.certs import init_authority

    print(init_authority(options.directory, days=options.days))
    return 0


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


def _issue(options: argparse.Namespace) -> int:
    from dflow.cli.certs import issue_to

    print(issue_to(options.directory, options.names, options.hosts, days=options.days))
    return 0


def _secret_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to make")


def _secret(options: argparse.Namespace) -> int:
    from dflow.cli.certs import make_secret

    print(make_secret(options.file))
    return 0


_ACTIONS = (
    Command("init", "make an authority that issues certificates", _init_options, _init),
    Command("issue", "issue a certificate for a task, a job, the coordinator or a tool", _issue_options, _issue),
    Command("secret", "write a shared secret to a file", _secret_options, _secret),
)
CERTS = Command(
    "certs",
    "make the certificates, or the secret, that machines of a cluster identify each other with",
    lambda parser: add_commands(parser, "action", _ACTIONS),
    more="; nothing is overwritten.",
)
