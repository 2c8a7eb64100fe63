"""`dflow.connect()`: join the cluster that the arguments or the environment configure, or run standalone."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.collectives.jax_runtime import refuse_late_start
from dflow.distributed.detection.cluster_file import VARIABLE
from dflow.distributed.detection.cluster_spec import SCRIPT_JOB, ClusterSpec, Variables
from dflow.distributed.detection.detect import found_cluster, task_index
from dflow.distributed.detection.this_host import detect_here, listening_address
from dflow.distributed.launching.sidecars import Sidecars
from dflow.distributed.observe.metrics import VARIABLE as METRICS_VARIABLE
from dflow.distributed.process import parent_watch
from dflow.distributed.process.dump_signal import dump_on_signal
from dflow.distributed.process.freed_memory import keep_freed_memory
from dflow.distributed.process.termination import Terminated
from dflow.distributed.standalone import standalone
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.security.configuration import choose_security
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.sockets import SocketTransport
from dflow.graphs.compiled_functions import function_data
from dflow.lowering.queues.timers import TIMERS
from dflow.state_backends import LOCAL
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.environment import read
from dflow.tracing.near_names import suggests_keywords

LOGGER = logging.getLogger("dflow")

#: Reason for leaving of a task whose `connect` fails after it has joined; the first line of its error follows.
_FAILED = "its connect() has failed: "

#: A join that takes longer than this, in s, is logged.
NOTICE_AFTER_S = 10.0


@suggests_keywords
def connect(
    coordinator: str | None = None,
    *,
    job: str | None = None,
    index: int | None = None,
    cluster: str | os.PathLike[str] | None = None,
    address: str | None = None,
    settings: ClusterSettings | None = None,
    security: SecurityPolicy | None = None,
    metrics_port: int | str | None = None,
    collectives: bool = False,
) -> Cluster:
    """Join a cluster as a worker, or run standalone; return the `Cluster`.

    Arguments that are omitted come from the first of these sources that is present: the cluster file that
    DFLOW_CLUSTER names; DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX, which `dflow launch` sets; Slurm; Kubernetes; a
    TPU VM. `dflow where` prints what was found and why. If none is present, this process runs standalone. Where a
    scheduler starts only workers, the first worker also starts the coordinator, and one worker per host a task server;
    they run until no worker needs them.

    coordinator  the coordinator's address, such as `10.0.0.1:7711`
    job          the job that this process is a task of; default "worker"
    index        index of this process's task within `job`
    cluster      path of a cluster file, instead of the one that DFLOW_CLUSTER names
    address      address to listen at, as `host` or `host:port`; default: the interface that leads to the coordinator,
                 and a free port
    settings     timeouts and limits; None means `ClusterSettings()`
    security     `dflow.distributed.MutualTls(...)` or `dflow.distributed.SharedSecret(...)`; default: as configured by
                 the cluster file, by DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA, or by DFLOW_SECRET_FILE; without
                 any of these, only connections within this machine are allowed
    metrics_port where to serve this task's metrics for Prometheus: `9100` for this machine only, `0.0.0.0:9100` for
                 all; default DFLOW_METRICS_PORT; if neither is set, or the process is standalone, none are served
    collectives  whether the workers are one group that computes together, for `dflow.distributed.AllReduce`: JAX's own
                 multi-process runtime is started, and `jax.devices()` lists the devices of all workers. All end when
                 one of them dies
    raises       DeadlineExceeded when the coordinator or a parameter task does not answer; ConfigError when the
                 configuration is incomplete, with what was found and what is missing; SecurityError for connections to
                 other machines without certificates or a secret; StrategyError for `collectives` if JAX has used a
                 device of the process already
    """
    spec = _spec(coordinator, job, index, cluster)
    if spec is None:
        return standalone(LOCAL.store)
    if collectives:
        refuse_late_start()
    keep_freed_memory(has_threads=True)
    parent_watch.watch()
    proofs = spec.security
    security = security or choose_security(os.environ, certificates=proofs.certificates, secret_file=proofs.secret_file)
    transport = SocketTransport(security=security)
    sidecars = _attend(spec)
    listens = listening_address(address or spec.listens, spec.coordinator)
    with _told_while_it_takes_long(spec):
        joined = join_cluster(
            spec.coordinator,
            transport,
            job=spec.job,
            index=spec.index,
            store=LOCAL.store,
            address=listens,
            settings=settings or ClusterSettings(),
        )
    try:
        served_at = read(METRICS_VARIABLE) if metrics_port is None else metrics_port
        if served_at != "":  # the address is printed as task servers do: the port may be any free one
            where, name = joined.serve_metrics(served_at), short_task_name(joined.task)
            print(f"dflow task {name}: metrics are served at {where}", file=sys.stderr, flush=True)
        if collectives:  # last: a runtime that has started ends only together with those of the other workers
            joined.part(Collectives).start()
    except BaseException as error:
        if Terminated.raised is None:  # with "finished" as its reason, other workers would wait for this one
            joined.coordinator.leave(_FAILED + str(error).partition("\n")[0])
        joined.close()
        raise
    joined.server.observer.functions = function_data
    dump_on_signal(joined.flights.dump_soon)
    if spec.starts:
        atexit.register(_leave, joined)
    if sidecars is not None:
        sidecars.stay_in_touch(transport)
    return joined


@contextmanager
def _told_while_it_takes_long(spec: ClusterSpec) -> Iterator[None]:
    """Log a warning while joining is slow: the error comes only after a minute, and often a task was not started."""

    def tell() -> None:
        LOGGER.warning(
            "%s is not in the cluster after %g s: the coordinator at %s does not answer yet, or tasks that it expects "
            "are missing; `dflow status --coordinator %s` says which",
            short_task_name(spec.task),
            NOTICE_AFTER_S,
            spec.coordinator,
            spec.coordinator,
        )

    timer = TIMERS.after(NOTICE_AFTER_S, tell)
    try:
        yield
    finally:
        timer.stop()


def _spec(
    coordinator: str | None, job: str | None, index: int | None, cluster: str | os.PathLike[str] | None
) -> ClusterSpec | None:
    said = dict(os.environ)
    if coordinator is not None:
        number = index if index is not None else task_index(Variables("connect", said))
        return ClusterSpec(coordinator, job or SCRIPT_JOB, number, listens=read("DFLOW_ADDRESS", said))
    said |= {VARIABLE: os.fspath(cluster)} if cluster is not None else {}
    said |= {"DFLOW_JOB": job} if job is not None else {}
    said |= {"DFLOW_INDEX": str(index)} if index is not None else {}
    spec = found_cluster(detect_here(said))
    if spec is None:
        return None
    return replace(spec, job=job or spec.job, index=spec.index if index is None else index)


def _attend(spec: ClusterSpec) -> Sidecars | None:
    """Start the sidecar processes of the spec, once, and register their end for the exit of this process."""
    if not spec.starts or spec.coordinator in _attended:
        return None
    sidecars = Sidecars(spec)
    _attended.add(spec.coordinator)

    def end() -> None:
        try:
            sidecars.wait_until_unneeded()
        finally:
            sidecars.close()

    atexit.register(end)
    return sidecars


def _leave(joined: Cluster) -> None:
    """Leave the cluster, before this process waits with its sidecars: other workers may wait for it likewise."""
    if getattr(sys, "last_value", None) is None:
        joined.close()
    else:  # the script failed
        joined.coordinator.close()


#: Addresses of coordinators whose sidecar processes this process has started, which it does once.
_attended: set[str] = set()
