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


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that connects to a cluster: --coordinator, and those of the next two functions."""
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help=f"the coordinator's address (default: {COORDINATOR_VARIABLE})"
    )
    add_cluster_file(parser)
    add_security(parser)


def add_cluster_file(parser: argparse.ArgumentParser) -> None:
    """Add --cluster."""
    parser.add_argument("--cluster", metavar="FILE", help="a cluster file (default: what DFLOW_CLUSTER names)")


def add_security(parser: argparse.ArgumentParser) -> None:
    """Add --certificates and --secret-file."""
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
    """Add --metrics-port."""
    parser.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve metrics for Prometheus there, 0 for a free port; on loopback unless a host is given "
        "(default: DFLOW_METRICS_PORT, else they are not served)",
    )


def add_host_names(parser: argparse.ArgumentParser, text: str) -> None:
    """Add --host-name: names of a web server besides its own, which it expects in the `Host` of requests."""
    parser.add_argument("--host-name", dest="host_names", action="append", default=[], metavar="NAME", help=text)


class ClusterOptions:
    """What the options of a command say of a cluster, and where they say nothing, its cluster file or the environment.

    `file`  the cluster file, if any; `--coordinator` takes precedence over one named in the environment
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        named = options.cluster
        if not named and not getattr(options, "coordinator", None):
            named = read(VARIABLE)
        self.file: ClusterFile | None = read_cluster_file(named) if named else None

    @property
    def coordinator(self) -> str:
        """The coordinator's address, `host:port`. Raises ConfigError if nothing sets it."""
        known = self._options.coordinator or (self.file.coordinator if self.file else read(COORDINATOR_VARIABLE))
        if not known:
            raise ConfigError(
                "where is the coordinator? give --coordinator HOST:PORT or --cluster FILE, or set "
                f"{COORDINATOR_VARIABLE}"
            )
        return str(known)

    @property
    def security(self) -> SecurityPolicy:
        """The policy with these credentials."""
        certificates, secret_file = self._options.certificates, self._options.secret_file
        if self.file and not (certificates or secret_file):
            certificates, secret_file = self.file.security.certificates, self.file.security.secret_file
        return choose_security(os.environ, certificates=certificates, secret_file=secret_file)

    @property
    def transport(self) -> Transport:
        """A transport with this security."""
        return SocketTransport(security=self.security)

    @property
    def metrics(self) -> str:
        """The `[HOST:]PORT` to serve metrics at; empty to serve none."""
        return str(self._options.metrics_port or read(METRICS_VARIABLE))
