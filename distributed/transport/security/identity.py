"""The identities in a certificate: the tasks whose names its holder may use.

Why: a valid certificate shows only that its holder belongs to the cluster. To stop a worker from posing as the
coordinator, each certificate lists the permitted names as URIs: `dflow://job/worker/task/3`, or `dflow://job/worker`
for every task of the job. A process that is no task, such as the coordinator or a monitoring tool, is a job without
tasks: `dflow://job/coordinator`.

Invariants: no I/O. A URI of any other form is ignored. A task is admitted by its number or its job, a process that is
no task by its job alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import DeviceError, SecurityError

_JOB = r"[A-Za-z][A-Za-z0-9_]*"
_INDEX = r"0|[1-9][0-9]{0,8}"
_TEXT = re.compile(rf"({_JOB})(?::({_INDEX}))?")
_URI = re.compile(rf"dflow://job/({_JOB})(?:/task/({_INDEX}))?")


@dataclass(frozen=True)
class Identity:
    """A task; without `index`, every task of the job, and a process that uses the job's name itself."""

    job: str
    index: int | None = None

    @property
    def uri(self) -> str:
        """The URI of this identity in a certificate."""
        return f"dflow://job/{self.job}" + ("" if self.index is None else f"/task/{self.index}")

    def __str__(self) -> str:
        return self.job if self.index is None else f"{self.job}:{self.index}"


def parse_identity(text: str) -> Identity:
    """Parse an identity such as `worker:3` or `worker`; raises ValueError for any other form."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no task and no job; write a task, such as worker:3, or a job, such as worker")
    return Identity(found[1], None if found[2] is None else int(found[2]))


def identities_of(uris: Iterable[str]) -> tuple[Identity, ...]:
    """Return the identities among the URIs of a certificate, ignoring other URIs."""
    found = [_URI.fullmatch(uri) for uri in uris]
    return tuple(Identity(one[1], None if one[2] is None else int(one[2])) for one in found if one is not None)


def require_admitted(identities: Collection[Identity], name: str) -> None:
    """Raise SecurityError unless the holder of a certificate for `identities` may use `name` in its `Hello`."""
    try:
        job, index = split_task_name(name)
        is_admitted = any(one.job == job and one.index in (None, index) for one in identities)
    except DeviceError:
        is_admitted = Identity(name) in identities
    if not is_admitted:
        known = ", ".join(map(str, identities)) or "nobody"
        raise SecurityError(
            f"the other side calls itself {name[:80]!r}, but its certificate is for {known}; "
            "issue one for that name, by `dflow certs issue DIR --name ...`"
        )
