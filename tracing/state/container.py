"""Containers: names for the lifetime of state.

State made inside `with container("run1"):` has a name that begins with `run1/`, and `reset_container("run1")` frees all
of it together. Containers nest. A container exists as long as it holds anything.
"""

from __future__ import annotations

import itertools
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from dflow.tracing.errors import ContainerError
from dflow.tracing.source import caller

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*")


class Resource(Protocol):
    """What a container holds: something with state."""

    name: str
    #: The task that holds the state; None is this process.
    device: str | None

    def forget(self, reason: str) -> None:
        """Free the state. Its later use raises an error that begins with `reason`."""
        ...


class _Members:
    """The living resources of each container."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._held: dict[str, weakref.WeakValueDictionary[int, Resource]] = {}

    def add(self, container: str, resource: Resource) -> None:
        with self._lock:
            held = self._held.setdefault(container, weakref.WeakValueDictionary())
            held[next(self._numbers)] = resource

    def names(self) -> set[str]:
        with self._lock:
            return {name for name, held in self._held.items() if len(held)}

    def within(self, container: str) -> list[Resource]:
        with self._lock:
            inside = [held for name, held in self._held.items() if _is_within(name, container)]
            return [resource for held in inside for resource in held.values()]

    def remove(self, container: str) -> None:
        with self._lock:
            self._held = {name: held for name, held in self._held.items() if not _is_within(name, container)}


_members = _Members()
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
    token = _current.set(contained(name))
    try:
        yield
    finally:
        _current.reset(token)


def contained(name: str) -> str:
    """The name that a resource called `name` has in the current container."""
    return f"{_current.get()}/{name}" if _current.get() else name


def uncontained(name: str) -> str:
    """The name without that of the current container, if it begins with it."""
    return name.removeprefix(f"{_current.get()}/") if _current.get() else name


def join(resource: Resource) -> None:
    """Put a resource into the current container, if there is one. The container does not keep it alive."""
    if _current.get():
        _members.add(_current.get(), resource)


def containers() -> tuple[str, ...]:
    """The containers that hold something, and those these are in, by name."""
    parts = [name.split("/") for name in _members.names()]
    return tuple(sorted({"/".join(part[:count]) for part in parts for count in range(1, len(part) + 1)}))


def resources_in(name: str) -> list[Resource]:
    """What is in a container and in those inside it. Raises ContainerError when there is no such container."""
    held = _members.within(name)
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
    _members.remove(name)


def _is_within(name: str, container: str) -> bool:
    return name == container or name.startswith(f"{container}/")
