"""Containers: names for the lifetime of state.

State made inside `with container("run1"):` has a name that begins with `run1/`, and `reset_container("run1")` frees all
of it together. Containers nest. A container exists as long as it holds anything.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from dflow.tracing.context_values import within
from dflow.tracing.errors import ContainerError
from dflow.tracing.source import caller
from dflow.tracing.weak_by_identity import WeakDict

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")


#: The living resources that are in a container, and its name.
_members: WeakDict[Any, str] = WeakDict()
_lock = threading.Lock()
_current: ContextVar[str] = ContextVar("dflow_container", default="")


@contextmanager
def container(name: str) -> Iterator[None]:
    """Make the variables, generators, queues and accumulators created inside belong to the container `name`.

    Their names begin with `name/`. Inside another container this one is `other/name`. Raises ContainerError for a name
    that is not made of letters, digits, `_`, `.`, `-` and single `/`.
    """
    given: Any = name
    if not isinstance(given, str) or _NAME.fullmatch(given) is None:
        raise ContainerError(
            f"{name!r} is not a container's name", "use letters, digits, '_', '.', '-', and '/' between parts"
        )
    with within(_current, contained(name)):
        yield


def outside_containers() -> AbstractContextManager[None]:
    """Make the resources created inside belong to no container, and have their names as they are given."""
    return within(_current, "")


def contained(name: str) -> str:
    """The name that a resource called `name` has in the current container."""
    return f"{_current.get()}/{name}" if _current.get() else name


def uncontained(name: str) -> str:
    """The name without that of the current container, if it begins with it."""
    return name.removeprefix(f"{_current.get()}/") if _current.get() else name


def join(resource: Any) -> None:
    """Put a resource, with a method `forget`, into the current container, if any. It is not kept alive by that."""
    if _current.get():
        with _lock:
            _members[resource] = _current.get()


def containers() -> tuple[str, ...]:
    """The containers that hold something, and those these are in, by name."""
    with _lock:
        parts = [name.split("/") for name in _members.values()]
    return tuple(sorted({"/".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}))


def resources_in(name: str) -> list[Any]:
    """The resources in a container and in those inside it. Raises ContainerError when there is no such container."""
    with _lock:
        held = [resource for resource, its in _members.items() if its == name or its.startswith(f"{name}/")]
    if not held:
        there = ", ".join(containers()) or "none"
        raise ContainerError(f"there is no container {name!r}; there are: {there}", "it may be reset already")
    return held


def reset_container(name: str) -> None:
    """Free all state that was made in the container and in the containers inside it.

    Later use of that state raises an error that names the container; the same names can be created again. State that
    other tasks hold is freed for all processes of the cluster.
    raises  ContainerError when there is no such container
    """
    held = resources_in(name)
    where = caller()
    reason = f"is gone: container {name!r} was reset{f' at {where.short}' if where else ''}"
    for resource in held:
        resource.forget(reason)
        with _lock:
            _members.pop(resource, None)
