"""The `dflow` command line: start a cluster, be a part of one, look at one or at an export, simulate one.

Each subcommand imports what it needs when it runs, so that `--help` and `launch` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflow import __version__
from dflow.distributed.lifeline import watch
from dflow.distributed.stop_signal import StopSignal
from dflow.launch_command import add_launch_command
from dflow.option_types import at_least_one, count, job_count
from dflow.simulation_options import add_simulate
from dflow.tracing.errors import ConfigError, DflowError
from dflow.tracing.task_name import task_name

if TYPE_CHECKING:
    from dflow.distributed.detection.cluster_file import ClusterFile
    from dflow.distributed.transport.base import Transport

COORDINATOR_VARIABLE = "DFLOW_COORDINATOR"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line `words` (those of the process when None) and return the exit status."""
    options = _parser().parse_args(words)
    try:
        status: int = options.run(options)
    except (DflowError, OSError, ValueError) as error:
        print(f"dflow {options.command}: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflow", description="Stateful dataflow on JAX and XLA.")
    parser.add_argument("--version", action="version", version=f"dflow {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_launch_command(commands)
    _add_task(commands)
    _add_coordinator(commands)
    _add_status(commands)
    _add_trace(commands)
    _add_dump(commands)
    _add_where(commands)
    _add_show(commands)
    _add_certs(commands)
    add_simulate(commands, _simulate)
    return parser


def _add_task(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "be a stock task, which holds variables and runs its parts of steps"
    parser = commands.add_parser("task", help=text, description=f"{text.capitalize()}; ends at SIGTERM.")
    parser.add_argument("--job", default="ps", help="the job this task belongs to (default: ps)")
    parser.add_argument(
        "--index",
        type=count,
        metavar="N",
        help="the task's number within the job (default: DFLOW_INDEX, or a pod's number in its Job or StatefulSet)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST[:PORT]",
        help="where to listen (default: what the cluster file says, else the address that leads to the coordinator)",
    )
    parser.add_argument(
        "--coordinator-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end when the coordinator was lost, and none was there again for so long (default: 600)",
    )
    _add_coordinator_address(parser)
    _add_security(parser)
    _add_metrics(parser)
    parser.set_defaults(run=_task)


def _add_coordinator(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "be the coordinator of a cluster"
    parser = commands.add_parser(
        "coordinator",
        help=text,
        description=f"{text.capitalize()}; prints its address as the first line, and ends at SIGTERM.",
    )
    parser.add_argument(
        "--job",
        dest="jobs",
        type=job_count,
        action="append",
        default=[],
        metavar="NAME=N",
        help="tasks to expect, such as ps=2; once for each job",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="where to listen (default: what the cluster file says, else a free port of DFLOW_ADDRESS or 127.0.0.1)",
    )
    _add_cluster_file(parser)
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a task not heard of for so long has left (default: 10)",
    )
    parser.add_argument(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a task that is at work and has ended no step for so long is told as stalled (default: 60)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="where its state is kept; started again with the same file and address it goes on where it was "
        "(default: in memory)",
    )
    _add_security(parser)
    _add_metrics(parser)
    parser.set_defaults(run=_coordinator)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "show what a running cluster is doing"
    parser = commands.add_parser(
        "status", help=text, description=f"{text.capitalize()}: its tasks, their steps, queues and what they send."
    )
    parser.add_argument("--watch", action="store_true", help="renew it each second, until Ctrl-C")
    _add_coordinator_address(parser)
    _add_security(parser)
    parser.set_defaults(run=_status)


def _add_trace(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "write what every task does in the next steps to a file for Perfetto"
    parser = commands.add_parser(
        "trace",
        help=text,
        description=f"{text.capitalize()}: what is computed, sent and waited for, with all tasks' clocks aligned.",
    )
    parser.add_argument("--steps", type=at_least_one, default=5, metavar="N", help="steps of each worker (default: 5)")
    parser.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="where to write (default: trace.json)"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long to wait for the steps (default: 60)"
    )
    _add_coordinator_address(parser)
    _add_security(parser)
    parser.set_defaults(run=_trace)


def _add_dump(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "have each task write its last events to a file"
    parser = commands.add_parser(
        "dump",
        help=text,
        description=f"{text.capitalize()}, in the folder that DFLOW_RUN_DIR names where it runs, and say which.",
    )
    _add_coordinator_address(parser)
    _add_security(parser)
    parser.set_defaults(run=_dump)


def _add_where(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "say which task of which cluster a script started here would be, and why"
    parser = commands.add_parser(
        "where",
        help=text,
        description=f"{text.capitalize()}: what dflow.connect() finds in the environment, in the order it looks.",
    )
    _add_cluster_file(parser)
    parser.set_defaults(run=_where)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "list what an export holds"
    parser = commands.add_parser("show", help=text, description=f"{text.capitalize()}: functions and variables.")
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory that dflow.export(...).save wrote")
    parser.set_defaults(run=_show)


def _add_certs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "make the certificates, or the secret, by which machines of a cluster know each other"
    parser = commands.add_parser("certs", help=text, description=f"{text.capitalize()}; nothing is overwritten.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")

    init = actions.add_parser("init", help="make an authority that issues certificates")
    init.add_argument("directory", type=Path, metavar="DIR", help="where its key and certificate go")
    init.add_argument("--days", type=at_least_one, default=3650, metavar="N", help="default: 3650")
    init.set_defaults(run=_certs_init)

    issue = actions.add_parser("issue", help="issue a certificate for a task, a job, the coordinator or a tool")
    issue.add_argument("directory", type=Path, metavar="DIR", help="the directory that `dflow certs init` wrote")
    issue.add_argument(
        "--name",
        dest="names",
        action="append",
        required=True,
        metavar="NAME",
        help="worker:3 for one task, worker for every task of a job, coordinator, or what a tool calls itself, such as "
        "status; once for each",
    )
    where = issue.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="a DNS name or IP address by which others reach it; once for each",
    )
    where.add_argument("--any-host", action="store_true", help="wherever it will run, when that is not known")
    issue.add_argument("--days", type=at_least_one, default=365, metavar="N", help="default: 365")
    issue.set_defaults(run=_certs_issue)

    secret = actions.add_parser("secret", help="write a shared secret to a file")
    secret.add_argument("file", type=Path, metavar="FILE", help="the file to make")
    secret.set_defaults(run=_certs_secret)


def _add_coordinator_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help=f"the coordinator's address (default: {COORDINATOR_VARIABLE})"
    )
    _add_cluster_file(parser)


def _add_security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may be spoken to on other machines").add_mutually_exclusive_group()
    group.add_argument(
        "--certificates",
        type=Path,
        metavar="DIR",
        help="whoever has a certificate by the same authority; a folder that `dflow certs issue` wrote (default: "
        "DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA)",
    )
    group.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="whoever knows the secret in this file, which `dflow certs secret` wrote (default: DFLOW_SECRET_FILE)",
    )


def _transport(options: argparse.Namespace) -> Transport:
    from dflow.distributed.transport.chosen_security import choose_security
    from dflow.distributed.transport.sockets import SocketTransport

    certificates, secret_file = options.certificates, options.secret_file
    file = _cluster_file(options)
    if file and not (certificates or secret_file):
        certificates, secret_file = file.security.certificates, file.security.secret_file
    return SocketTransport(security=choose_security(os.environ, certificates=certificates, secret_file=secret_file))


def _add_metrics(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve metrics for Prometheus there, 0 for a free port, to this machine alone unless a host is said "
        "(default: DFLOW_METRICS_PORT, else they are not served)",
    )


def _metrics(options: argparse.Namespace) -> str:
    return str(options.metrics_port or os.environ.get("DFLOW_METRICS_PORT", ""))


def _add_cluster_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cluster", metavar="FILE", help="a cluster file (default: what DFLOW_CLUSTER names)")


def _coordinator(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.coordinator import serve_coordinator
    from dflow.distributed.coordinator_state import CoordinatorSettings
    from dflow.distributed.coordinator_store import MemoryStore, SqliteStore
    from dflow.distributed.detection.this_host import with_port

    store = MemoryStore() if options.state is None else SqliteStore(options.state)
    settings = CoordinatorSettings(heartbeat_timeout_s=options.heartbeat_timeout, stall_timeout_s=options.stall_timeout)
    file = _cluster_file(options)
    jobs = dict(options.jobs) or (file.counts if file else {})
    address = options.address or (file.coordinator if file else with_port(os.environ.get("DFLOW_ADDRESS", "127.0.0.1")))
    transport, metrics = _transport(options), _metrics(options)
    return serve_coordinator(stop, transport, address, jobs, store=store, settings=settings, metrics=metrics)


def _task(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.detection.cluster_spec import Variables
    from dflow.distributed.detection.this_host import listening_address
    from dflow.distributed.detection.variables import task_index
    from dflow.distributed.stock_task import serve_task

    index = task_index(Variables("dflow task", os.environ)) if options.index is None else options.index
    coordinator, listens = _coordinator_of(options), options.address
    if listens is None:
        file = _cluster_file(options)
        listens = file.spec(options.job, index).listens if file else os.environ.get("DFLOW_ADDRESS", "")
    address = listening_address(listens, coordinator)
    task, give_up_s = task_name(options.job, index), options.coordinator_timeout
    transport, metrics = _transport(options), _metrics(options)
    return serve_task(stop, transport, task, coordinator, address, give_up_s=give_up_s, metrics=metrics)


def _status(options: argparse.Namespace) -> int:
    from dflow.live_status import show_status
    from dflow.status_view import closing_tables, make_console

    show_status(
        _transport(options),
        _coordinator_of(options),
        make_console(),
        watch=options.watch,
        closing=lambda status: closing_tables(status, {}),
    )
    return 0


def _trace(options: argparse.Namespace) -> int:
    from dflow.observing import trace

    transport, coordinator = _transport(options), _coordinator_of(options)
    for line in trace(transport, coordinator, options.out, steps=options.steps, timeout_s=options.timeout):
        print(line)
    return 0


def _dump(options: argparse.Namespace) -> int:
    from dflow.observing import dump

    for line in dump(_transport(options), _coordinator_of(options)):
        print(line)
    return 0


def _where(options: argparse.Namespace) -> int:
    from dflow.distributed.detection.detect import detect, explained
    from dflow.distributed.detection.this_host import surroundings

    environment = {**os.environ, **({"DFLOW_CLUSTER": options.cluster} if options.cluster else {})}
    print(explained(detect(surroundings(environment)), environment))
    return 0


def _cluster_file(options: argparse.Namespace) -> ClusterFile | None:
    """The cluster file that was named; a coordinator on the command line comes before a file in the environment."""
    from dflow.distributed.detection.cluster_file import VARIABLE, read_cluster_file

    named = options.cluster
    if not named and not getattr(options, "coordinator", None):
        named = os.environ.get(VARIABLE)
    return read_cluster_file(named) if named else None


def _coordinator_of(options: argparse.Namespace) -> str:
    file = _cluster_file(options)
    known = options.coordinator or (file.coordinator if file else os.environ.get(COORDINATOR_VARIABLE))
    if not known:
        raise ConfigError(
            f"where is the coordinator? give --coordinator HOST:PORT or --cluster FILE, or set {COORDINATOR_VARIABLE}"
        )
    return str(known)


def _show(options: argparse.Namespace) -> int:
    from dflow.export_format import listing, read_manifest

    print(listing(read_manifest(options.path)))
    return 0


def _certs_init(options: argparse.Namespace) -> int:
    from dflow.certs import init_authority

    print(init_authority(options.directory, days=options.days))
    return 0


def _certs_issue(options: argparse.Namespace) -> int:
    from dflow.certs import issue_to

    print(issue_to(options.directory, options.names, options.hosts, days=options.days))
    return 0


def _certs_secret(options: argparse.Namespace) -> int:
    from dflow.certs import make_secret

    print(make_secret(options.file))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from dflow.simulation_view import show_schedules, show_size

    if options.step is not None:
        return show_size(options)
    steps = options.steps or 9
    return show_schedules(
        options.seed, options.schedules, options.workers, options.ps, steps, options.faults, options.log
    )


def _become_server() -> StopSignal:
    """Before anything slow is imported, so that neither SIGTERM nor the launcher's end is missed meanwhile."""
    stop = StopSignal()
    watch()
    return stop


if __name__ == "__main__":
    sys.exit(main())
