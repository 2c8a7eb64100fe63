"""`dflow.connect()`: join the cluster that the arguments or the surroundings say, or be a cluster of one."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dflow.distributed import lifeline
from dflow.distributed.alone import Alone
from dflow.distributed.cluster import Cluster, ClusterSettings
from dflow.distributed.detection.cluster_file import VARIABLE
from dflow.distributed.detection.cluster_spec import SCRIPT_JOB, ClusterSpec, Variables
from dflow.distributed.detection.detect import detect, found_cluster
from dflow.distributed.detection.this_host import listening_address, surroundings
from dflow.distributed.detection.variables import task_index
from dflow.distributed.dump_signal import dump_on_signal
from dflow.distributed.launching.attendants import Attendants
from dflow.distributed.metrics import VARIABLE as METRICS_VARIABLE
from dflow.distributed.transport.chosen_security import choose_security
from dflow.distributed.transport.security import SecurityPolicy
from dflow.distributed.transport.sockets import SocketTransport
from dflow.homes import LOCAL
from dflow.lowering.timers import TIMERS
from dflow.tracing.task_name import short_task_name

LOGGER = logging.getLogger("dflow")

#: How long joining may take before the log says so.
NOTICE_AFTER_S = 10.0


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
) -> Cluster | Alone:
    """Join a cluster as a worker, or run alone.

    What is not given is found out from, in this order, the cluster file that DFLOW_CLUSTER names, the variables
    DFLOW_COORDINATOR, DFLOW_JOB and DFLOW_INDEX that `dflow launch` sets, Slurm, Kubernetes, and a TPU VM; `dflow
    where` says what is found and why. Without any of them, this process runs alone. Where a scheduler starts workers
    only, the first of them runs the coordinator beside itself, and one on each host a stock task, until no worker
    needs them.

    coordinator  the coordinator's address, such as `10.0.0.1:7711`
    job          the job this process is a task of; "worker" where nothing else says it
    index        which task of `job` this process is
    cluster      the path of a cluster file, in the place of the one that DFLOW_CLUSTER names
    address      where this process listens, as `host` or `host:port`; the address towards the coordinator, and a free
                 port, where nothing else says it
    security     `dflow.distributed.MutualTls(...)` or `dflow.distributed.SharedSecret(...)`; given none, as the cluster
                 file says, or the environment's DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA, or DFLOW_SECRET_FILE;
                 without these, only processes of this machine are spoken to
    metrics_port where this task's metrics are served for Prometheus, as `9100` for this machine alone or
                 `0.0.0.0:9100`; DFLOW_METRICS_PORT where nothing is given; without these, they are not served, nor by a
                 process that runs alone, which has none
    raises       DeadlineExceeded when the coordinator or a parameter task does not answer; ConfigError when only a
                 part of a cluster is said: it names what was seen and what is missing; SecurityError off this
                 machine without certificates or a secret
    """
    spec = _spec(coordinator, job, index, cluster)
    if spec is None:
        return Alone()
    lifeline.watch()
    transport = SocketTransport(security=security or _security(spec))
    attendants = _attend(spec)
    listens = listening_address(address or spec.listens, spec.coordinator)
    with _told_while_it_takes_long(spec):
        joined = Cluster(
            spec.coordinator,
            transport,
            job=spec.job,
            index=spec.index,
            store=LOCAL.store,
            address=listens,
            settings=settings or ClusterSettings(),
        )
    dump_on_signal(joined.flights.dump_soon)
    if attendants is not None:
        attendants.stay_in_touch(transport)
    place = os.environ.get(METRICS_VARIABLE, "") if metrics_port is None else metrics_port
    if place != "":
        try:
            where = joined.serve_metrics(place)
        except BaseException:
            joined.close()
            raise
        # As stock tasks and the coordinator say it: of a free port nobody else knows the number.
        print(f"dflow task {short_task_name(joined.task)}: metrics are served at {where}", file=sys.stderr, flush=True)
    return joined


@contextmanager
def _told_while_it_takes_long(spec: ClusterSpec) -> Iterator[None]:
    """A line in the log before a wait of a minute, most often for what was not started, ends by an error."""

    def tell() -> None:
        LOGGER.warning(
            "%s is not in the cluster after %g s: the coordinator at %s does not answer yet, or tasks that it expects "
            "are missing; `dflow status --coordinator %s` says which",
            short_task_name(spec.task),
            NOTICE_AFTER_S,
            spec.coordinator,
            spec.coordinator,
        )

    timer = TIMERS.start(NOTICE_AFTER_S, tell)
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
        return ClusterSpec(coordinator, job or SCRIPT_JOB, number, listens=said.get("DFLOW_ADDRESS", ""))
    said |= {VARIABLE: os.fspath(cluster)} if cluster is not None else {}
    said |= {"DFLOW_JOB": job} if job is not None else {}
    said |= {"DFLOW_INDEX": str(index)} if index is not None else {}
    spec = found_cluster(detect(surroundings(said)))
    if spec is None:
        return None
    return replace(spec, job=job or spec.job, index=spec.index if index is None else index)


def _security(spec: ClusterSpec) -> SecurityPolicy:
    said = spec.security
    return choose_security(os.environ, certificates=said.certificates, secret_file=said.secret_file)


def _attend(spec: ClusterSpec) -> Attendants | None:
    """Start what the spec says beside this process, once, and see to its end when this process ends."""
    if not spec.starts or spec.coordinator in _attended:
        return None
    attendants = Attendants(spec)
    _attended.add(spec.coordinator)

    def end() -> None:
        try:
            attendants.wait_until_unneeded()
        finally:
            attendants.close()

    atexit.register(end)
    return attendants


#: The coordinators beside which this process has started what it had to.
_attended: set[str] = set()
