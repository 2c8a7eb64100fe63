"""`dflow launch`: run a script on a cluster of processes that are started, watched and ended together."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dflow.cli.certs import FILES_OF_CERTIFICATE
from dflow.cli.cluster_options import add_security
from dflow.cli.command import Command, add_all_tables, add_seconds, at_least_one, checked, count, job_count
from dflow.cli.launch_backends import add_backends, backend_of
from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.compilation_cache import SWITCH_VARIABLE, cache_folder, cache_variables
from dflow.distributed.launching.dashboard_address import require_dashboard
from dflow.distributed.launching.launch_plan import LaunchPlan, Setting
from dflow.distributed.launching.restarts import restart_limit
from dflow.distributed.process.run_folder import RUN_FOLDER_VARIABLE
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.security.configuration import CERTIFICATE_VARIABLES, SECRET_VARIABLE, choose_security
from dflow.distributed.transport.sockets import SocketTransport
from dflow.tracing.accepted_faults import accepted
from dflow.tracing.environment import read
from dflow.tracing.errors import DflowError


def _launch_options(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--ps", type=count, default=1, metavar="N", help="the same as --stock ps=N (default: 1)")
    tasks.add_argument(
        "--workers", type=at_least_one, default=1, metavar="N", help="the same as --job worker=N (default: 1)"
    )
    for option, dest, text in (
        ("--job", "jobs", "tasks of another job that run the script, such as evaluator=1; repeatable"),
        ("--stock", "stock", "stock tasks of another job, such as embeddings=4; repeatable"),
    ):
        tasks.add_argument(option, dest=dest, type=job_count, action="append", default=[], metavar="NAME=N", help=text)
    faults = parser.add_argument_group("when a task fails")
    faults.add_argument(
        "--restart",
        dest="restarts",
        type=_restart,
        action="append",
        default=[],
        metavar="[JOB=]POLICY",
        help="never (default), or on-failure[:N]: start it again, up to N times in a row (default: 3), immediately, "
        "then after pauses of 1 s, 2 s, and so on up to 60 s; without a job, of the tasks that run the script and of "
        "the coordinator, which goes on where it was. A stock task, ps=POLICY, comes back empty without --snapshots. "
        "Repeatable",
    )
    faults.add_argument(
        "--snapshots",
        type=Path,
        metavar="DIR",
        help="where stock tasks keep snapshots of their state: one that is started again (--restart ps=on-failure) "
        "returns to the newest one, all others with it, and training goes on from there; so does the next launch "
        "there, unless this one ends with success",
    )
    faults.add_argument(
        "--accept",
        type=checked(accepted),
        default=None,
        metavar="FAULTS",
        help="end with status 0 in spite of `short`, batches that end before the steps of a run, or `not-finite`, a "
        "loss that is NaN or infinite; both with a comma (default: DFLOW_ACCEPT)",
    )
    add_seconds(faults, "--snapshot-every", 60, "time between two snapshots")
    add_backends(parser)
    parser.add_argument(
        "--env",
        dest="environment",
        type=checked(Setting.parse),
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
    _add_compilation_cache(parser)
    add_all_tables(parser)
    parser.add_argument(
        "--dashboard",
        action="store_true",
        help="show the run in the browser, at a free port of this machine; the address is printed at the start",
    )
    parser.add_argument(
        "--dashboard-port",
        metavar="[HOST:]PORT",
        help="show it there; off loopback only with certificates or a secret",
    )
    add_security(parser)
    parser.add_argument("script", help="the Python script that each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _add_compilation_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compilation-cache",
        action="store_true",
        help="compile all programs at each start; by default each host keeps up to 1 GiB of them in "
        "~/.cache/dflow/compiled, or in the folder of JAX_COMPILATION_CACHE_DIR as JAX's variables say",
    )


def _cache_news(environment: Mapping[str, str]) -> str:
    """Return the line that says where tasks with this environment keep what they compile; empty if that decides it."""
    if (folder := cache_folder(environment)) is None:
        return ""
    if cache_variables(environment):
        return f"compiled programs are kept for later starts in {folder}"
    return f"compiled programs are not kept for later starts: {folder} is not a folder that this user alone can write"


def _launch(options: argparse.Namespace) -> int:
    if not Path(options.script).is_file():
        print(f"dflow launch: there is no script {options.script!r} in {Path.cwd()}", file=sys.stderr)
        return 2
    kept = None
    try:
        plan = _launch_plan(options)
        make_target = backend_of(options)
        security = choose_security(os.environ, certificates=options.certificates, secret_file=options.secret_file)
        if plan.dashboard:
            require_dashboard(plan.dashboard, security)
        if options.snapshots is not None:
            from dflow.distributed.launching.launch_state import LaunchState

            kept = LaunchState(options.snapshots.resolve(), options.script, plan.stock)
        target, note = make_target(plan, options, security)
    except DflowError as error:
        if kept is not None:
            kept.close()
        print(f"dflow launch: {error}", file=sys.stderr)
        return 2
    # After Ray has started, because Ray installs its own SIGTERM handler.
    stop = StopSignal()
    from dflow.cli.closing_summary import closing_summary
    from dflow.cli.status_view import LoggedView, closing_tables, launch_view, make_console
    from dflow.distributed.launching.launcher import launch
    from dflow.distributed.launching.run_logs import RunLogs

    logs = RunLogs(options.logs or Path(tempfile.mkdtemp(prefix=f"dflow-{Path(options.script).stem}-")))
    with (
        launch_view(make_console(), closing_tables if options.all_tables else closing_summary) as shown,
        contextlib.closing(logs),
        contextlib.nullcontext() if kept is None else contextlib.closing(kept),
        tempfile.TemporaryDirectory(prefix="dflow-state-") as state,
    ):
        view = LoggedView(shown, logs)
        view.show_event(f"{note}each task's output is kept in {logs.folder}")
        if news := _cache_news({**os.environ, **{one.name: one.value for one in plan.environment}}):
            view.show_event(news)
        if kept is not None:
            view.show_event(kept.news)
        plan = _kept_here(plan, f"{state}/coordinator" if kept is None else str(kept.path), logs.folder)
        status = launch(stop, plan, target, view, SocketTransport(security=security))
        if kept is not None and status == 0:
            kept.finish()
        return status


def _proofs(options: argparse.Namespace) -> tuple[Setting, ...]:
    """Return settings that give every task these credentials, and clear those of the environment."""
    if options.certificates is None and options.secret_file is None:
        return ()
    said = dict.fromkeys((*CERTIFICATE_VARIABLES, SECRET_VARIABLE), "")
    if options.certificates is not None:
        folder = options.certificates.resolve()
        said |= {name: str(folder / f) for name, f in zip(CERTIFICATE_VARIABLES, FILES_OF_CERTIFICATE, strict=True)}
    else:
        said[SECRET_VARIABLE] = str(options.secret_file.resolve())
    return tuple(Setting(name, value) for name, value in said.items())


def _kept_here(plan: LaunchPlan, state: str, logs: Path) -> LaunchPlan:
    """Return the plan with paths for the coordinator's state and for each task's last events."""
    said = () if RUN_FOLDER_VARIABLE in os.environ else (Setting(RUN_FOLDER_VARIABLE, str(logs.resolve())),)
    return replace(plan, state=state, environment=(*said, *plan.environment))


def _launch_plan(options: argparse.Namespace) -> LaunchPlan:
    jobs = {"worker": options.workers, **dict(options.jobs)}
    of_scripts = [policy for job, policy in options.restarts if not job]
    restarts = dict.fromkeys([*jobs, COORDINATOR], of_scripts[-1]) if of_scripts else {}
    switch = (Setting(SWITCH_VARIABLE, "0"),) if options.no_compilation_cache else ()
    return LaunchPlan(
        options.script,
        tuple(options.arguments),
        stock={"ps": options.ps, **dict(options.stock)},
        jobs=jobs,
        restarts=restarts | {job: policy for job, policy in options.restarts if job},
        snapshots="" if options.snapshots is None else str(options.snapshots.resolve()),
        snapshot_every_s=options.snapshot_every,
        environment=(*_proofs(options), *switch, *options.environment),
        dashboard=options.dashboard_port or ("0" if options.dashboard else ""),
        accept=accepted(read("DFLOW_ACCEPT")) if options.accept is None else options.accept,
    )


def _restart(text: str) -> tuple[str, int]:
    """Parse `POLICY` or `JOB=POLICY` to the job (empty if absent) and its number of restarts."""
    job, equals, policy = text.rpartition("=")
    if equals and not job:
        raise argparse.ArgumentTypeError(f"{text!r} has no job before the =; write it as ps=on-failure")
    return job, checked(restart_limit)(policy)


LAUNCH = Command(
    "launch",
    "run a script on a cluster of processes, on this machine or others",
    _launch_options,
    _launch,
    more=": a coordinator, stock tasks for variables, and the script once per worker.",
    epilog="A worker that dies does not end the run; a stock task or the coordinator that does ends it, unless "
    "--restart says otherwise. Exit status: 0 when a worker finished, none failed on its own account and all "
    "steps were done; 130 after Ctrl-C "
    "or SIGTERM; 2 when the command line is wrong; else 1.",
)
