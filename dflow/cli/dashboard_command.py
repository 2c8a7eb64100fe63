"""`dflow dashboard`: serve pages about a running cluster until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse

from dflow.cli.cluster_options import ClusterOptions, add_cluster, add_host_names
from dflow.cli.command import Command
from dflow.distributed.launching.dashboard_address import SERVING, require_dashboard
from dflow.distributed.process.parent_watch import watch
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.sockets import SocketTransport


def _dashboard_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default="0",
        metavar="[HOST:]PORT",
        help="where to serve it; off loopback only with certificates or a secret (default: a free port of 127.0.0.1)",
    )
    add_host_names(parser, "another name of it in browsers, such as a proxy's; repeatable")
    add_cluster(parser)


def _serve_dashboard(options: argparse.Namespace) -> int:
    stop = StopSignal()  # before slow imports, during which a signal could be missed
    watch()
    cluster = ClusterOptions(options)
    security, coordinator = cluster.security, cluster.coordinator
    require_dashboard(options.address, security)
    from dflow.dashboard.serving import DashboardServer

    transport = SocketTransport(security=security)
    server = DashboardServer(transport, coordinator, options.address, security=security, host_names=options.host_names)
    print(f"{SERVING}{server.address}", flush=True)
    status, _ = stop.wait_for_exit_status()
    server.close()
    return status


DASHBOARD = Command(
    "dashboard",
    "show a running cluster in the browser",
    _dashboard_options,
    _serve_dashboard,
    more=": its tasks, curves, graphs, traces and events. Prints the address to open as its first line.",
)
