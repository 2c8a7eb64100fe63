"""`dflow serve`: answer inference requests over HTTP and gRPC with an export, until SIGTERM."""

from __future__ import annotations

import argparse
import gc
import os
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from dflow.cli.cluster_options import add_certificates, add_host_names
from dflow.cli.command import Command, add_seconds, at_least_one, count
from dflow.distributed.process.parent_watch import watch
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.addresses import TcpAddress, parse_address
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.errors import ConfigError, DeadlineExceeded, ExportError, RemoteError

if TYPE_CHECKING:
    from dflow.distributed.cluster.cluster import Cluster
    from dflow.distributed.transport.security.policy import SecurityPolicy
    from dflow.serving.model_server import ModelServer
    from dflow.serving.rows.task_rows import TableShard
    from dflow.serving.rows.training_job import TrainingJob
    from dflow.serving.served_version import ServingSettings

#: The job that servers are tasks of, or by whose first task's name they ask.
SERVERS = "server"
#: Most servers that are tasks of one cluster.
_MOST_SERVERS = 100


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="DIR",
        help="an export, a folder of its versions DIR/1, DIR/2, ..., or a folder of such models",
    )
    parser.add_argument(
        "--address", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to listen (default: 127.0.0.1:8000)"
    )
    parser.add_argument("--grpc", metavar="HOST:PORT", help="where to listen for gRPC, too (default: nowhere)")
    add_host_names(parser, "without certificates: another name of it in requests, such as a proxy's; repeatable")
    parser.add_argument("--name", help="the model's name (default: that of DIR)")
    parser.add_argument(
        "--max-batch",
        type=at_least_one,
        default=0,
        metavar="N",
        help="compute the rows of several requests in one call of at most N rows (default: each request alone)",
    )
    parser.add_argument(
        "--max-delay-ms",
        type=float,
        metavar="MS",
        help="with --max-batch, wait at most this time for more rows of a batch (default: 2)",
    )
    parser.add_argument(
        "--max-queue", type=at_least_one, default=256, metavar="N", help="most requests in progress (default: 256)"
    )
    parser.add_argument(
        "--max-bytes",
        type=at_least_one,
        default=64 << 20,
        metavar="N",
        help="most bytes of a request (default: 64 MiB)",
    )
    add_seconds(parser, "--timeout", 30, "refuse a request whose computation has not begun after this time")
    add_seconds(parser, "--poll", 5, "look for newer versions in this interval; 0: on request only")
    add_seconds(parser, "--grace", 30, "at SIGTERM, answer the requests in progress for at most this time")
    parser.add_argument("--learn", action="store_true", help="serve functions that write variables, too")
    add_seconds(
        parser, "--save-every", 0, "with --learn, save changed state in this interval as a new version; 0: never"
    )
    tables = parser.add_argument_group("tables that are larger than this server")
    tables.add_argument(
        "--tables",
        metavar="HOST:PORT",
        help="look rows of the tables up at the ps tasks of the cluster whose coordinator is there: as they change, if "
        "a job trains them there; else the tasks load them, and each reads its part of DIR",
    )
    tables.add_argument(
        "--cache-rows", type=count, default=0, metavar="N", help="keep at most N rows of each table here (default: 0)"
    )
    add_seconds(
        tables, "--max-age", None, "fetch a row again when it has been kept for this time", "10 with a job, else never"
    )
    tables.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the secret of that cluster (default: what --certificates says, else DFLOW_SECRET_FILE)",
    )
    add_certificates(parser)


def _serve(options: argparse.Namespace) -> int:
    _check(options)
    stop = StopSignal()  # before slow imports, during which a signal could be missed
    watch()
    # Else gRPC logs each failed TLS handshake, which any client can cause, without a limit.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dflow.calls.trace_log import RetraceWarning
    from dflow.distributed.client.coordinator_client import leave_all
    from dflow.distributed.cluster.cluster import Cluster
    from dflow.distributed.process.dump_signal import dump_on_signal

    try:
        from dflow.serving.model_server import ModelServer
    except ImportError as error:
        raise ConfigError(
            f"models are served by {error.name}, which is not installed", "pip install 'dflow[serve]'"
        ) from error

    # A collection of garbage, which delays all requests, need not look at the objects of imported modules.
    gc.freeze()
    # The server bounds the number of programs, and compiles those of each version again.
    warnings.simplefilter("ignore", RetraceWarning)
    address = _tcp_address("--address", options.address)
    grpc = None if options.grpc is None else _tcp_address("--grpc", options.grpc)
    security, to_cluster = _securities(options, address, grpc)
    with ExitStack() as stack:
        tables = None
        if options.tables is not None:
            tables = stop.until_done(lambda: _tables(options, to_cluster), leave_all)
            stack.callback(tables.close)
        if isinstance(tables, Cluster):
            dump_on_signal(tables.flights.dump_soon)  # which only the main thread can
        server = ModelServer(
            options.path,
            address,
            _settings(options, tables),
            security,
            grpc=grpc,
            name=options.name,
            poll_s=options.poll,
            save_every_s=options.save_every,
            host_names=options.host_names,
        )
        _print_models(server)
        which = stop.wait()
        is_clean = server.stop(options.grace)
    return 0 if is_clean and which else 1


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for options without the one that they need, before the wait for a cluster."""
    if options.max_delay_ms is not None and not options.max_batch:
        raise ConfigError("--max-delay-ms is the longest wait for more rows of a batch", "give --max-batch N")
    if options.tables is None and (options.cache_rows or options.max_age is not None or options.secret_file):
        raise ConfigError(
            "--cache-rows, --max-age and --secret-file are for tables at tasks", "give --tables HOST:PORT"
        )
    if options.max_age is not None and not options.cache_rows:
        raise ConfigError("--max-age is the longest time that rows are kept, and none are", "give --cache-rows N")
    if options.tables is not None and options.learn:
        raise ConfigError(
            "--learn: expected tables in this process, got tables at tasks, which lose what calls write",
            "leave out one of --learn and --tables",
        )


def _securities(options: argparse.Namespace, *addresses: TcpAddress | None) -> tuple[SecurityPolicy, SecurityPolicy]:
    """Return the policies towards clients, which are to connect to these addresses, and towards the cluster."""
    from dflow.distributed.transport.security.configuration import choose_security
    from dflow.distributed.transport.security.policy import SameMachine
    from dflow.distributed.transport.security.shared_secret import SharedSecret

    security = choose_security(os.environ, certificates=options.certificates)
    to_cluster = security if options.secret_file is None else SharedSecret(options.secret_file)
    is_local = all(address is None or address.is_loopback for address in addresses)
    if options.tables is not None and is_local and isinstance(security, SharedSecret):
        security = SameMachine()  # clients of HTTP cannot prove the secret, which is for the cluster
    return security, to_cluster


def _settings(options: argparse.Namespace, tables: Cluster | TrainingJob | None) -> ServingSettings:
    from dflow.serving.served_version import ServingSettings

    return ServingSettings(
        max_batch=options.max_batch,
        max_delay_s=ServingSettings.max_delay_s if options.max_delay_ms is None else options.max_delay_ms / 1e3,
        max_queue=options.max_queue,
        max_bytes=options.max_bytes,
        timeout_s=options.timeout,
        learn=options.learn,
        tables=tables,
        cache_rows=options.cache_rows,
        max_age_s=options.max_age,
    )


def _print_models(server: ModelServer) -> None:
    for model in server.models.values():
        if (version := model.current) is None:
            print(f"{model.name} is not served, and will be tried again: {model.unavailable}", flush=True)
            continue
        for queue in version.queues.values():
            # A folder may have a name that a URL has to quote.
            path = quote(f"/v2/models/{queue.tensors.name}")
            print(f"version {version.number} at {server.url}{path}", flush=True)
        for name, reason in version.refused.items():
            print(f"{model.name}.{name} is not served: {reason}", flush=True)
    if server.grpc_address is not None:
        print(f"gRPC at {server.grpc_address}", flush=True)


def _tables(options: argparse.Namespace, security: SecurityPolicy) -> Cluster | TrainingJob:
    """Return the job that trains the tables. If none does, join the cluster as a server, whose tables its tasks load.

    Raises as `dflow.connect`, and SecurityError.
    """
    from dflow.distributed.transport.sockets import SocketTransport
    from dflow.serving.rows.training_job import TrainingJob

    job = TrainingJob(options.tables, SocketTransport(security=security), name=task_name(SERVERS, 0))
    exports = _tables_of_exports(options)
    if not job.trains([shard.name for shards in exports for shard in shards]):
        job.close()
        return _member(options, security)
    print(f"rows of tables are those of the job at {options.tables}, as they change", flush=True)
    for shards in exports:
        with suppress(ExportError, DeadlineExceeded):  # which the load of that version raises again
            job.rows(shards).close()
    return job


def _tables_of_exports(options: argparse.Namespace) -> list[list[TableShard]]:
    """Return the tables of the newest version of each model."""
    from dflow.exporting.export_format import read_manifest
    from dflow.exporting.task_tables import tables_of
    from dflow.serving.rows.task_rows import shards_of
    from dflow.serving.served_model import find_models, versions_in

    found = []
    for folder in find_models(options.path, options.name).values():
        _, path = max(versions_in(folder).items())
        with suppress(ExportError):  # it is refused when it is loaded
            manifest = read_manifest(path)
            away = tables_of(manifest)
            found.append([one for one in shards_of(path, manifest, of_ids=True) if one.name in away])
    return found


def _member(options: argparse.Namespace, security: SecurityPolicy) -> Cluster:
    """Join the cluster that is to hold the tables, as the first task of the job `server` whose name is free."""
    from dflow.cluster import connect
    from dflow.distributed.cluster.cluster import ClusterSettings

    settings = ClusterSettings(step_timeout_s=options.timeout)
    for index in range(_MOST_SERVERS):
        with suppress(RemoteError):  # a live task has the name
            return connect(options.tables, job=SERVERS, index=index, security=security, settings=settings)
    raise ConfigError(f"--tables: {_MOST_SERVERS} servers are tasks of the cluster at {options.tables} already")


def _tcp_address(option: str, text: str) -> TcpAddress:
    address = parse_address(text)
    if not isinstance(address, TcpAddress):
        raise ConfigError(f"{option}: expected HOST:PORT, got {text!r}", "give a host and a port")
    return address


SERVE = Command(
    "serve",
    "answer inference requests over HTTP and gRPC with an export",
    _options,
    _serve,
    more=", by the Open Inference Protocol v2, until SIGTERM.",
)
