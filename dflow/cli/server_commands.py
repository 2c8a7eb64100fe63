"""`dflow task` and `dflow coordinator`: serve as a member of a cluster until SIGTERM."""

from __future__ import annotations

import argparse
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflow.cli.cluster_options import ClusterOptions, add_cluster, add_cluster_file, add_metrics, add_security
from dflow.cli.command import Command, add_seconds, count, job_count
from dflow.distributed.coordinator_role import run_coordinator
from dflow.distributed.process.freed_memory import keep_freed_memory
from dflow.distributed.process.parent_watch import watch
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError


def _task_options(parser: argparse.ArgumentParser) -> None:
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
        "--snapshots",
        type=Path,
        metavar="DIR",
        help="where its parts of snapshots are kept; started again with the same folder, it returns to the newest one; "
        "SIGTERM ends it when a snapshot has its state "
        "(default: none are made)",
    )
    add_seconds(parser, "--coordinator-timeout", 600, "end when the coordinator has been unreachable for this time")
    add_cluster(parser)
    add_metrics(parser)


def _coordinator_options(parser: argparse.ArgumentParser) -> None:
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
    add_cluster_file(parser)
    add_seconds(parser, "--heartbeat-timeout", 10, "declare a task dead after this time without a heartbeat")
    add_seconds(
        parser,
        "--holder-timeout",
        60,
        "declare a task that holds variables or queues dead after this time without a heartbeat; until then steps wait",
    )
    add_seconds(
        parser,
        "--snapshot-every",
        0,
        "have the tasks save their state in this interval, so that one that is started again returns to it; 0: never",
    )
    add_seconds(parser, "--stall-timeout", 60, "report a busy task that has ended no step for this time as stalled")
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="where its state is kept; started again with the same file and address it goes on where it was, or, if "
        "all tasks have ended, at the newest snapshot "
        "(default: in memory)",
    )
    add_security(parser)
    add_metrics(parser)


def _be_task(options: argparse.Namespace) -> int:
    keep_freed_memory(has_threads=False)
    stop = StopSignal()  # before slow imports, during which a signal could be missed
    watch()
    from dflow.distributed.detection.cluster_spec import Variables
    from dflow.distributed.detection.detect import task_index
    from dflow.distributed.detection.this_host import listening_address
    from dflow.distributed.task_role import run_task

    index = task_index(Variables("dflow task", os.environ)) if options.index is None else options.index
    cluster, listens = ClusterOptions(options), options.address
    coordinator = cluster.coordinator
    if listens is None:
        listens = cluster.file.spec(options.job, index).listens if cluster.file else read("DFLOW_ADDRESS")
    address = listening_address(listens, coordinator)
    with _told_who_listens(address):
        return run_task(
            stop,
            cluster.transport,
            task_name(options.job, index),
            coordinator,
            address,
            give_up_s=options.coordinator_timeout,
            metrics=cluster.metrics,
            snapshots=options.snapshots,
        )


def _be_coordinator(options: argparse.Namespace) -> int:
    stop = StopSignal()  # before slow imports, during which a signal could be missed
    watch()
    from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
    from dflow.distributed.coordinator.coordinator_store import MemoryStore, SqliteStore
    from dflow.distributed.detection.this_host import with_port

    store = MemoryStore() if options.state is None else SqliteStore(options.state)
    settings = CoordinatorSettings(
        heartbeat_timeout_s=options.heartbeat_timeout,
        holder_timeout_s=options.holder_timeout,
        stall_timeout_s=options.stall_timeout,
        snapshot_every_s=options.snapshot_every,
    )
    cluster = ClusterOptions(options)
    file = cluster.file
    jobs = dict(options.jobs) or (file.counts if file else {})
    address = options.address or (file.coordinator if file else with_port(read("DFLOW_ADDRESS") or LOOPBACK))
    with _told_who_listens(address):
        return run_coordinator(
            stop, cluster.transport, address, jobs, store=store, settings=settings, metrics=cluster.metrics
        )


@contextmanager
def _told_who_listens(address: str) -> Iterator[None]:
    """Turn the bare "address in use" error of the system into a ConfigError with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        where = address.partition(";")[0]
        raise ConfigError(
            f"cannot listen at {where}, for another process does, such as one that was started before by the same "
            "words",
            "end it, or listen elsewhere by --address HOST:PORT",
        ) from error


TASK = Command(
    "task",
    "be a stock task, which holds variables and runs its parts of steps",
    _task_options,
    _be_task,
    more="; ends at SIGTERM.",
)
COORDINATOR = Command(
    "coordinator",
    "be the coordinator of a cluster",
    _coordinator_options,
    _be_coordinator,
    more="; prints its address as the first line, and ends at SIGTERM.",
)
