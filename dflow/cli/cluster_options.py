"""Options of the commands that connect to a cluster or serve in one, combined with the environment's settings."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dflow.distributed.detection.cluster_file import VARIABLE, ClusterFile, read_cluster_file
from dflow.distributed.detection.cluster_spec import COORDINATOR_VARIABLE
from dflow.distributed.observe.metrics import VARIABLE as METRICS_VARIABLE
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.security.configuration import choose_security
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.sockets import SocketTransport
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError


def add_coordinator_address(parser: argparse.ArgumentParser) -> None:
    """Add --coordinator and --cluster; see `coordinator_of`."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help=f"the coordinator's address (default: {COORDINATOR_VARIABLE})"
    )
    add_cluster_file(parser)


def add_cluster_file(parser: argparse.ArgumentParser) -> None:
    """Add --cluster; see `cluster_file_of`."""
    parser.add_argument("--cluster", metavar="FILE", help="a cluster file (default: what DFLOW_CLUSTER names)")


def add_security(parser: argparse.ArgumentParser) -> None:
    """Add --certificates and --secret-file; see `transport_of`."""
    group = parser.add_argument_group("peers to accept on other machines").add_mutually_exclusive_group()
    add_certificates(group)
    group.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="accept peers that know this secret, written by `dflow certs secret` (default: DFLOW_SECRET_FILE)",
    )


def add_certificates(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="accept peers with a certificate by the same authority; a folder that `dflow certs issue` wrote (default: "
        "DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA)",
    )


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """Add --metrics-port; see `metrics_place_of`."""
    parser.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve metrics for Prometheus there, 0 for a free port; on loopback unless a host is given "
        "(default: DFLOW_METRICS_PORT, else they are not served)",
    )


def add_host_names(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --host-name: names of a web server besides its own, which it expects in the `Host` of requests."""
    parser.add_argument("--host-name", dest="host_names", action="append", default=[], metavar="NAME", help=text)


def cluster_file_of(options: argparse.Namespace) -> ClusterFile | None:
    """Return the cluster file to use, if any. `--coordinator` takes precedence over a file named in the environment."""
    named = options.cluster
    if not named and not getattr(options, "coordinator", None):
        named = read(VARIABLE)
    return read_cluster_file(named) if named else None


def coordinator_of(options: argparse.Namespace) -> str:
    """Return the coordinator's address, `host:port`. Raises ConfigError if nothing sets it."""
    file = cluster_file_of(options)
    known = options.coordinator or (file.coordinator if file else read(COORDINATOR_VARIABLE))
    if not known:
        raise ConfigError(
            f"where is the coordinator? give --coordinator HOST:PORT or --cluster FILE, or set {COORDINATOR_VARIABLE}"
        )
    return str(known)


def transport_of(options: argparse.Namespace) -> Transport:
    """Return the transport, with the policy of `security_of`."""
    return SocketTransport(security=security_of(options))


def security_of(options: argparse.Namespace) -> SecurityPolicy:
    """Return the security policy, with credentials from the options, else the cluster file, else the environment."""
    certificates, secret_file = options.certificates, options.secret_file
    file = cluster_file_of(options)
    if file and not (certificates or secret_file):
        certificates, secret_file = file.security.certificates, file.security.secret_file
    return choose_security(os.environ, certificates=certificates, secret_file=secret_file)


def metrics_place_of(options: argparse.Namespace) -> str:
    """Return the `[HOST:]PORT` to serve metrics at; empty to serve none."""
    return str(options.metrics_port or read(METRICS_VARIABLE))
