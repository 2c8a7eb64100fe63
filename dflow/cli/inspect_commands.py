"""`dflow status`, `trace`, `dump`, `where` and `show`: inspect a cluster, the environment, or an export."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dflow.cli.cluster_options import ClusterOptions, add_cluster, add_cluster_file
from dflow.cli.command import Command, add_all_tables, add_seconds, at_least_one
from dflow.tracing.errors import ConfigError


def _status_options(parser: argparse.ArgumentParser) -> None:
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--watch", action="store_true", help="renew it each second, until Ctrl-C")
    add_all_tables(shown)
    shown.add_argument(
        "--up",
        metavar="TASK",
        help="show nothing, and end with status 0 if this task, such as ps:0 or coordinator, is up and 1 if not: a "
        "probe for a scheduler",
    )
    add_cluster(parser)


def _show_cluster(options: argparse.Namespace) -> int:
    cluster = ClusterOptions(options)
    transport, coordinator = cluster.transport, cluster.coordinator
    if options.up is not None:
        from dflow.dashboard.observing import is_up

        return 0 if is_up(transport, coordinator, options.up) else 1
    from dflow.cli.closing_summary import closing_summary
    from dflow.cli.live_status import show_status
    from dflow.cli.status_view import closing_tables, make_console

    summary = closing_tables if options.all_tables else closing_summary
    show_status(transport, coordinator, make_console(), watch=options.watch, summary=summary)
    return 0


def _trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=at_least_one, default=5, metavar="N", help="steps of each worker (default: 5)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where to write (default: trace.json; with --summary, no file is written)",
    )
    parser.add_argument(
        "--summary", action="store_true", help="print how the time of a step divides at each task, in tables"
    )
    add_seconds(parser, "--timeout", 60, "how long to wait for the steps")
    add_cluster(parser)


def _trace_cluster(options: argparse.Namespace) -> None:
    from dflow.dashboard.observing import trace

    path = options.out or (None if options.summary else Path("trace.json"))
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} for {path.name}", "make it, or give another --out")
    cluster = ClusterOptions(options)
    transport, coordinator = cluster.transport, cluster.coordinator
    asked = {"steps": options.steps, "timeout_s": options.timeout}
    if options.summary:
        from dflow.cli.cost_tables import show_summary
        from dflow.cli.status_view import make_console

        show_summary(transport, coordinator, make_console(), path=path, **asked)
        return
    for line in trace(transport, coordinator, path, **asked)[1]:
        print(line)


def _dump_cluster(options: argparse.Namespace) -> None:
    from dflow.dashboard.observing import dump

    cluster = ClusterOptions(options)
    for line in dump(cluster.transport, cluster.coordinator):
        print(line)


def _say_where(options: argparse.Namespace) -> None:
    from dflow.distributed.detection.detect import explained
    from dflow.distributed.detection.this_host import detect_here

    environment = {**os.environ, **({"DFLOW_CLUSTER": options.cluster} if options.cluster else {})}
    print(explained(detect_here(environment), environment))


def _show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory that dflow.export(...).save wrote")


def _show_export(options: argparse.Namespace) -> None:
    from dflow.exporting.export_format import read_manifest
    from dflow.exporting.export_manifest import listing

    print(listing(read_manifest(options.path)))


STATUS = Command(
    "status",
    "show what a running cluster is doing",
    _status_options,
    _show_cluster,
    more=": its tasks, their steps, queues and what they send.",
)
TRACE = Command(
    "trace",
    "write what every task does in the next steps to a file for Perfetto, or sum it up",
    _trace_options,
    _trace_cluster,
    more=": what is computed, sent and waited for, with all tasks' clocks aligned.",
)
DUMP = Command(
    "dump",
    "have each task write its last events to a file",
    add_cluster,
    _dump_cluster,
    more=", in the folder that DFLOW_RUN_DIR names where it runs, and say which.",
)
WHERE = Command(
    "where",
    "show the task and the cluster that a script started here would join, and why",
    add_cluster_file,
    _say_where,
    more=": what dflow.connect() finds in the environment, in the order it looks.",
)
SHOW = Command("show", "list what an export holds", _show_options, _show_export, more=": functions and variables.")
