"""The `dflow` command line: start a cluster, be a part of one, look at one or at an export.

Each subcommand imports what it needs when it runs, so that `--help` and `launch` answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dflow import __version__
from dflow.distributed.lifeline import watch
from dflow.distributed.stop_signal import StopSignal
from dflow.tracing.errors import DflowError
from dflow.tracing.task_name import task_name

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
    _add_launch(commands)
    _add_task(commands)
    _add_coordinator(commands)
    _add_status(commands)
    _add_show(commands)
    return parser


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "run a script on a cluster of processes on this machine"
    parser = commands.add_parser(
        "launch",
        help=text,
        description=f"{text.capitalize()}: a coordinator, ps tasks for variables, and the script once per worker.",
        epilog="A worker that dies does not end the run. Exit status: 0 when a worker finished and none failed by "
        "itself; 130 after Ctrl-C; else 1.",
    )
    parser.add_argument("--ps", type=_count, default=1, metavar="N", help="ps tasks (default: 1)")
    parser.add_argument("--workers", type=_at_least_one, default=1, metavar="N", help="workers (default: 1)")
    parser.add_argument("script", help="the Python script that each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=_launch)


def _add_task(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "be a stock task, which holds variables and runs its parts of steps"
    parser = commands.add_parser("task", help=text, description=f"{text.capitalize()}; ends at SIGTERM.")
    parser.add_argument("--job", default="ps", help="the job this task belongs to (default: ps)")
    parser.add_argument("--index", type=_count, required=True, metavar="N", help="the task's number within the job")
    _add_coordinator_address(parser)
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
        type=_job_count,
        action="append",
        default=[],
        metavar="NAME=N",
        help="tasks to expect, such as ps=2; once for each job",
    )
    parser.add_argument("--address", default="127.0.0.1:0", help="where to listen (default: 127.0.0.1, a free port)")
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a task not heard of for so long has left (default: 10)",
    )
    parser.set_defaults(run=_coordinator)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "show what a running cluster is doing"
    parser = commands.add_parser("status", help=text, description=f"{text.capitalize()}, once.")
    _add_coordinator_address(parser)
    parser.set_defaults(run=_status)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "list what an export holds"
    parser = commands.add_parser("show", help=text, description=f"{text.capitalize()}: functions and variables.")
    parser.add_argument("path", type=Path, metavar="DIR", help="the directory that dflow.export(...).save wrote")
    parser.set_defaults(run=_show)


def _add_coordinator_address(parser: argparse.ArgumentParser) -> None:
    known = os.environ.get(COORDINATOR_VARIABLE)
    parser.add_argument(
        "--coordinator",
        default=known,
        required=known is None,
        metavar="HOST:PORT",
        help=f"the coordinator's address (default: {COORDINATOR_VARIABLE})",
    )


def _launch(options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        print(f"dflow launch: there is no script {options.script!r} in {Path.cwd()}", file=sys.stderr)
        return 2
    stop = StopSignal()
    from dflow.distributed.launcher import LaunchPlan, launch
    from dflow.distributed.transport.sockets import SocketTransport
    from dflow.status_view import make_console, make_view

    plan = LaunchPlan(options.ps, options.workers, options.script, tuple(options.arguments))
    with make_view(make_console()) as view:
        return launch(stop, plan, view, SocketTransport())


def _coordinator(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.coordinator import serve_coordinator
    from dflow.distributed.transport.sockets import SocketTransport

    return serve_coordinator(
        stop, SocketTransport(), options.address, dict(options.jobs), heartbeat_timeout_s=options.heartbeat_timeout
    )


def _task(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.stock_task import serve_task
    from dflow.distributed.transport.sockets import SocketTransport

    return serve_task(stop, SocketTransport(), task_name(options.job, options.index), options.coordinator)


def _status(options: argparse.Namespace) -> int:
    from dflow.distributed.coordinator_client import CoordinatorClient
    from dflow.distributed.transport.sockets import SocketTransport
    from dflow.status_view import closing_tables, make_console, progress_line

    client = CoordinatorClient(SocketTransport(), options.coordinator, name="status", timeout_s=5.0)
    status = client.status(timeout_s=5.0)
    client.close()
    console = make_console()
    console.print(progress_line(status, status.steps_done / max(status.now_s, 1.0)), markup=False, highlight=False)
    console.print(closing_tables(status, {}))
    return 0


def _show(options: argparse.Namespace) -> int:
    from dflow.export_format import listing, read_manifest

    print(listing(read_manifest(options.path)))
    return 0


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError(f"{count} is negative; give 0 or more")
    return count


def _at_least_one(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too few; give 1 or more")
    return count


def _job_count(text: str) -> tuple[str, int]:
    job, equals, count = text.partition("=")
    if not (job and equals and count.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=N, such as ps=2")
    return job, int(count)


def _become_server() -> StopSignal:
    """Before anything slow is imported, so that neither SIGTERM nor the launcher's end is missed meanwhile."""
    stop = StopSignal()
    watch()
    return stop


if __name__ == "__main__":
    sys.exit(main())
