"""`dflow.connect()`: join the cluster that the launcher or the environment says, or be a cluster of one."""

from __future__ import annotations

import os

from dflow.distributed import lifeline
from dflow.distributed.alone import Alone
from dflow.distributed.cluster import Cluster, ClusterSettings
from dflow.distributed.transport.chosen_security import choose_security
from dflow.distributed.transport.security import SecurityPolicy
from dflow.distributed.transport.sockets import SocketTransport
from dflow.homes import LOCAL
from dflow.tracing.errors import ConfigError


def connect(
    coordinator: str | None = None,
    *,
    job: str | None = None,
    index: int | None = None,
    settings: ClusterSettings | None = None,
    security: SecurityPolicy | None = None,
) -> Cluster | Alone:
    """Join a cluster as a worker, or run alone.

    coordinator  the coordinator's address, such as `127.0.0.1:4321`; given none, the environment's DFLOW_COORDINATOR,
                 with DFLOW_JOB and DFLOW_INDEX, as `dflow launch` sets them; without that, this process runs alone
    job          the job this process is a task of; given none, "worker" where the environment says nothing
    index        which task of `job` this process is
    security     `dflow.distributed.MutualTls(...)` or `dflow.distributed.SharedSecret(...)`; given none, as the
                 environment's DFLOW_TLS_CERT, DFLOW_TLS_KEY and DFLOW_TLS_CA, or DFLOW_SECRET_FILE, say; without these,
                 only processes of this machine are spoken to
    raises       DeadlineExceeded when the coordinator or a parameter task does not answer; ConfigError when an
                 address is known but no index; SecurityError when one of them may not be spoken to
    """
    address = coordinator or os.environ.get("DFLOW_COORDINATOR")
    if not address:
        return Alone()
    lifeline.watch()
    number = index if index is not None else _index_from_environment()
    return Cluster(
        address,
        SocketTransport(security=security or choose_security(os.environ)),
        job=job or (os.environ.get("DFLOW_JOB") if coordinator is None else None) or "worker",
        index=number,
        store=LOCAL.store,
        settings=settings or ClusterSettings(),
    )


def _index_from_environment() -> int:
    text = os.environ.get("DFLOW_INDEX", "")
    if not text.isdigit():
        raise ConfigError(
            f"DFLOW_INDEX is {text!r}, so it is not known which worker this is\n"
            "  start the script with `dflow launch`, or give connect() an index"
        )
    return int(text)
