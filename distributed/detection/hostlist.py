"""Expansion of Slurm's short form of a list of hosts, such as `rack[0-1]n[08-11,15],login`.

A number keeps its leading zeros. Several brackets in one name vary independently, the last one fastest.
"""

from __future__ import annotations

import itertools
import re

from dflow.tracing.errors import ConfigError

#: Most names in a list. No machine has more, so a longer list is a mistake, or an attempt to exhaust memory.
MAX_HOSTS = 1 << 20

_NAME = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expanded(hosts: str) -> list[str]:
    """Return the names in order; raises ConfigError, which quotes the text, for a malformed list."""
    names: list[str] = []
    at = 0
    while at < len(hosts):
        found = _NAME.match(hosts, at)
        if found is None or hosts[found.end() : found.end() + 1] not in ("", ","):
            raise _unreadable(hosts)
        names += _names(found[0], hosts)
        at = found.end() + 1
    if not names or hosts.endswith(","):
        raise _unreadable(hosts)
    return names


def _names(short: str, hosts: str) -> list[str]:
    choices = [_numbers(part[1], hosts) if part[1] is not None else [part[2]] for part in _PART.finditer(short)]
    count = 1
    for choice in choices:
        count *= len(choice)
        _refuse_too_many(count, hosts)
    return ["".join(name) for name in itertools.product(*choices)]


def _numbers(ranges: str, hosts: str) -> list[str]:
    numbers: list[str] = []
    for text in ranges.split(","):
        found = _RANGE.fullmatch(text.strip())
        if found is None:
            raise _unreadable(hosts)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _unreadable(hosts)
        _refuse_too_many(len(numbers) + int(last) - int(first) + 1, hosts)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _refuse_too_many(count: int, hosts: str) -> None:
    if count > MAX_HOSTS:
        raise ConfigError(f"the list of hosts {hosts[:80]!r} stands for more than {MAX_HOSTS} hosts")


def _unreadable(hosts: str) -> ConfigError:
    return ConfigError(f"{hosts[:80]!r} is no list of hosts; one looks like node1,node[03-07],rack[0-1]n[1-4]")
