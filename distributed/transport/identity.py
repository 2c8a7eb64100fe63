"""Which tasks a certificate may speak for, as names in it.

Why: that a certificate is good says only that someone in the cluster holds it; that a worker cannot pass for the
coordinator takes names that both are held to. A certificate carries each as a URI: `dflow://job/worker/task/3`, or
`dflow://job/worker` for every task of the job. What is no task, such as the coordinator or a tool that looks on, is a
job without tasks: `dflow://job/coordinator`.

Invariants: no I/O; a URI that is not of exactly this form names no one; a task is admitted by its number or by its job,
and what is no task by its job alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dflow.tracing.errors import DeviceError, SecurityError
from dflow.tracing.task_name import split_task_name

_JOB = r"[A-Za-z][A-Za-z0-9_]*"
_INDEX = r"0|[1-9][0-9]{0,8}"
_TEXT = re.compile(rf"({_JOB})(?::({_INDEX}))?")
_URI = re.compile(rf"dflow://job/({_JOB})(?:/task/({_INDEX}))?")


@dataclass(frozen=True)
class Identity:
    """A task, or with no `index` every task of a job and whatever calls itself by the job's name."""

    job: str
    index: int | None = None

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"dflow://job/{self.job}" + ("" if self.index is None else f"/task/{self.index}")

    def __str__(self) -> str:
        return self.job if self.index is None else f"{self.job}:{self.index}"


def parse_identity(text: str) -> Identity:
    """The identity written as `worker:3` or `worker`; raises ValueError when it is neither."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names nobody; write a task, such as worker:3, or a whole job, such as worker")
    return Identity(found[1], None if found[2] is None else int(found[2]))


def identities_of(uris: Iterable[str]) -> tuple[Identity, ...]:
    """The identities among the URIs of a certificate; others are passed over."""
    found = [_URI.fullmatch(uri) for uri in uris]
    return tuple(Identity(one[1], None if one[2] is None else int(one[2])) for one in found if one is not None)


def admits(identities: Iterable[Identity], name: str) -> bool:
    """Whether a certificate for `identities` may speak as `name`, which is what a `Hello` says."""
    try:
        job, index = split_task_name(name)
    except DeviceError:
        return Identity(name) in tuple(identities)
    return any(one.job == job and one.index in (None, index) for one in identities)


def require_admitted(identities: tuple[Identity, ...], name: str) -> None:
    """Raise SecurityError unless a certificate for `identities` may speak as `name`."""
    if admits(identities, name):
        return
    known = ", ".join(map(str, identities)) or "nobody"
    raise SecurityError(
        f"the other side calls itself {name[:80]!r}, but its certificate is for {known}; "
        "issue one for that name, by `dflow certs issue DIR --name ...`"
    )
