"""The `dflow` command line: start a cluster, be a part of one, look at one or at an export.

Each subcommand imports what it needs when it runs, so that `--help` and `launch` answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dflow import __version__
from dflow.distributed.launching.launch_plan import LaunchPlan, Setting
from dflow.distributed.launching.restarts import RestartPolicy
from dflow.distributed.launching.shares import Share, core_shares, gpu_shares, visible_gpus
from dflow.distributed.lifeline import watch
from dflow.distributed.stop_signal import StopSignal
from dflow.tracing.errors import DflowError
from dflow.tracing.task_name import task_name

if TYPE_CHECKING:
    from dflow.distributed.transport.base import Transport

COORDINATOR_VARIABLE = "DFLOW_COORDINATOR"
_Parsed = TypeVar("_Parsed")


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
    _add_certs(commands)
    return parser


def _add_launch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "run a script on a cluster of processes on this machine"
    parser = commands.add_parser(
        "launch",
        help=text,
        description=f"{text.capitalize()}: a coordinator, stock tasks for variables, and the script once per worker.",
        epilog="A worker that dies does not end the run; a stock task or the coordinator that does ends it, unless "
        "--restart says otherwise. Exit status: 0 when a worker finished and none failed by itself; 130 after Ctrl-C "
        "or SIGTERM; 2 when the command line is wrong; else 1.",
    )
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--ps", type=_count, default=1, metavar="N", help="the same as --stock ps=N (default: 1)")
    tasks.add_argument(
        "--workers", type=_at_least_one, default=1, metavar="N", help="the same as --job worker=N (default: 1)"
    )
    _add_counts(tasks, "--job", "jobs", "tasks of another job that run the script, such as evaluator=1; repeatable")
    _add_counts(tasks, "--stock", "stock", "stock tasks of another job, such as embeddings=4; repeatable")
    faults = parser.add_argument_group("when a task fails")
    faults.add_argument(
        "--restart",
        dest="restarts",
        type=_restart,
        action="append",
        default=[],
        metavar="[JOB=]POLICY",
        help="never (default), or on-failure[:N]: start it again, up to N times in a row (default: 3), after pauses of "
        "1 s, 2 s, and so on up to 60 s; without a job, of the tasks that run the script. A stock task comes back "
        "empty. Repeatable",
    )
    share = parser.add_argument_group("what each worker gets of this machine")
    share.add_argument(
        "--gpus-per-worker",
        type=_count,
        metavar="N",
        help="GPUs for itself alone, 0 for none (default: an even part; several share a GPU's memory when there are "
        "fewer GPUs than workers)",
    )
    share.add_argument(
        "--cpus-per-worker",
        type=_at_least_one,
        metavar="N",
        help="cores it is kept on, which no other gets (default: all cores, with an even part of as many threads)",
    )
    share.add_argument(
        "--env",
        dest="environment",
        type=_checked(Setting.parse),
        action="append",
        default=[],
        metavar="[JOB:[INDEX:]]NAME=VALUE",
        help="set an environment variable for all tasks, one job or one task; repeatable",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        metavar="DIR",
        help="where each task's output is written, up to twice 64 MiB each (default: a new folder in the system's "
        "folder for temporary files)",
    )
    parser.add_argument("script", help="the Python script that each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=_launch)


def _add_task(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "be a stock task, which holds variables and runs its parts of steps"
    parser = commands.add_parser("task", help=text, description=f"{text.capitalize()}; ends at SIGTERM.")
    parser.add_argument("--job", default="ps", help="the job this task belongs to (default: ps)")
    parser.add_argument("--index", type=_count, required=True, metavar="N", help="the task's number within the job")
    _add_coordinator_address(parser)
    _add_security(parser)
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
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="where its state is kept; started again with the same file and address it goes on where it was "
        "(default: in memory)",
    )
    _add_security(parser)
    parser.set_defaults(run=_coordinator)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "show what a running cluster is doing"
    parser = commands.add_parser("status", help=text, description=f"{text.capitalize()}, once.")
    _add_coordinator_address(parser)
    _add_security(parser)
    parser.set_defaults(run=_status)


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
    init.add_argument("--days", type=_at_least_one, default=3650, metavar="N", help="default: 3650")
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
    issue.add_argument("--days", type=_at_least_one, default=365, metavar="N", help="default: 365")
    issue.set_defaults(run=_certs_issue)

    secret = actions.add_parser("secret", help="write a shared secret to a file")
    secret.add_argument("file", type=Path, metavar="FILE", help="the file to make")
    secret.set_defaults(run=_certs_secret)


def _add_coordinator_address(parser: argparse.ArgumentParser) -> None:
    known = os.environ.get(COORDINATOR_VARIABLE)
    parser.add_argument(
        "--coordinator",
        default=known,
        required=known is None,
        metavar="HOST:PORT",
        help=f"the coordinator's address (default: {COORDINATOR_VARIABLE})",
    )


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

    return SocketTransport(
        security=choose_security(os.environ, certificates=options.certificates, secret_file=options.secret_file)
    )


def _launch(options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        print(f"dflow launch: there is no script {options.script!r} in {Path.cwd()}", file=sys.stderr)
        return 2
    try:
        plan = _launch_plan(options)
        shares = _shares(plan.workers, options)
    except DflowError as error:
        print(f"dflow launch: {error}", file=sys.stderr)
        return 2
    stop = StopSignal()
    from dflow.distributed.launcher import launch
    from dflow.distributed.launching.run_logs import RunLogs
    from dflow.distributed.launching.this_machine import ThisMachine
    from dflow.distributed.transport.chosen_security import choose_security
    from dflow.distributed.transport.sockets import SocketTransport
    from dflow.status_view import LoggedView, make_console, make_view

    transport = SocketTransport(security=choose_security(os.environ))

    logs = RunLogs(options.logs or Path(tempfile.mkdtemp(prefix=f"dflow-{Path(options.script).stem}-")))
    with make_view(make_console()) as shown, contextlib.closing(logs):
        view = LoggedView(shown, logs)
        view.show_event(f"each task's output is kept in {logs.folder}")
        return launch(stop, plan, ThisMachine(shares), view, transport)


def _launch_plan(options: argparse.Namespace) -> LaunchPlan:
    jobs = {"worker": options.workers, **dict(options.jobs)}
    of_scripts = [policy for job, policy in options.restarts if not job]
    restarts = dict.fromkeys(jobs, of_scripts[-1]) if of_scripts else {}
    return LaunchPlan(
        options.script,
        tuple(options.arguments),
        stock={"ps": options.ps, **dict(options.stock)},
        jobs=jobs,
        restarts=restarts | {job: policy for job, policy in options.restarts if job},
        environment=tuple(options.environment),
    )


def _shares(workers: Sequence[str], options: argparse.Namespace) -> dict[str, Share]:
    """What each worker gets of this machine, by full name."""
    given = os.environ
    gpus = gpu_shares(visible_gpus(given), len(workers), options.gpus_per_worker, given)
    cores = core_shares(sorted(os.sched_getaffinity(0)), len(workers), options.cpus_per_worker, given)
    return {
        task: replace(core, environment={**core.environment, **gpu})
        for task, core, gpu in zip(workers, cores, gpus, strict=True)
    }


def _coordinator(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.coordinator import serve_coordinator
    from dflow.distributed.coordinator_state import CoordinatorSettings
    from dflow.distributed.coordinator_store import MemoryStore, SqliteStore

    store = MemoryStore() if options.state is None else SqliteStore(options.state)
    settings = CoordinatorSettings(heartbeat_timeout_s=options.heartbeat_timeout)
    return serve_coordinator(
        stop, _transport(options), options.address, dict(options.jobs), store=store, settings=settings
    )


def _task(options: argparse.Namespace) -> int:
    stop = _become_server()
    from dflow.distributed.stock_task import serve_task

    return serve_task(stop, _transport(options), task_name(options.job, options.index), options.coordinator)


def _status(options: argparse.Namespace) -> int:
    from dflow.distributed.coordinator_client import CoordinatorClient
    from dflow.status_view import closing_tables, make_console, progress_line

    client = CoordinatorClient(_transport(options), options.coordinator, name="status", timeout_s=5.0)
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


def _restart(text: str) -> tuple[str, RestartPolicy]:
    """`POLICY` or `JOB=POLICY`, as the job, empty when there is none, and the policy."""
    job, equals, policy = text.rpartition("=")
    if equals and not job:
        raise argparse.ArgumentTypeError(f"{text!r} has no job before the =; write it as ps=on-failure")
    return job, _checked(RestartPolicy.parse)(policy)


def _checked(parse: Callable[[str], _Parsed]) -> Callable[[str], _Parsed]:
    """The same, whose ValueError is told to the user of the command line as it is."""

    def parsed(text: str) -> _Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _add_counts(parser: argparse._ArgumentGroup, option: str, dest: str, text: str) -> None:
    parser.add_argument(option, dest=dest, type=_job_count, action="append", default=[], metavar="NAME=N", help=text)


def _become_server() -> StopSignal:
    """Before anything slow is imported, so that neither SIGTERM nor the launcher's end is missed meanwhile."""
    stop = StopSignal()
    watch()
    return stop


if __name__ == "__main__":
    sys.exit(main())
