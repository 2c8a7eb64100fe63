"""The faults of a schedule as a value, which is formatted, parsed, or drawn from a seed.

Its text is the argument of `python -m tests.simulation --faults`: words separated by commas, such as
`loss=0.1,late=0.2,twice=0.05,kill=worker:0@3.5+2,power=ps:1@4+3,cut=worker:0/coordinator@2+6,hang=ps:0@5+1,slow=ps:1*20`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dflow.tracing.moments import ROLES

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Outage:
    """A host, or the network between two hosts, does not work for `for_s`, from `at_s` on."""

    hosts: tuple[str, ...]
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{'/'.join(self.hosts)}@{self.at_s:g}+{self.for_s:g}"

    @property
    def end_s(self) -> float:
        """The time at which it ends."""
        return self.at_s + self.for_s


@dataclass(frozen=True)
class Slow:
    """Everything that `host` does takes `factor` times as long."""

    host: str
    factor: float

    def __str__(self) -> str:
        return f"{self.host}*{self.factor:g}"


@dataclass(frozen=True)
class AtMoment:
    """A host's process ends when any process reaches the moment `name` for the `count`th time; another starts later.

    `for_s` is the time until then. The moments are those of `dflow.tracing.moments`, with a hyphen for a blank.
    """

    name: str
    count: int
    host: str
    for_s: float

    def __str__(self) -> str:
        return f"{self.name.replace(' ', '-')}*{self.count}/{self.host}+{self.for_s:g}"


@dataclass(frozen=True)
class Faults:
    """The faults of one schedule.

    `loss`   the fraction of packets that are lost and resent
    `late`   the fraction of packets that take up to a second longer
    `twice`  the fraction of values and cancellations between tasks that arrive twice
    `mixed`  the fraction of these that later messages may overtake
    `breaks` the fraction of packets on which their stream breaks; the connection continues over a new stream
    `kill`   a host's process ends, its system closes its connections, and another process starts after the outage
    `power`  likewise, but no peer is notified; a coordinator ends right after its next write to its store, before it
             sends any result of that write
    `cut`    no packet passes between two hosts
    `hang`   a host's process does nothing, and then continues
    `slow`   a host takes longer for all its work
    `full`   a ps's writes of parts of snapshots fail, or the coordinator's writes of its state
    `torn`   the parts of snapshots that a ps has written lose half of a file
    `flip`   the parts of snapshots that a ps has written have one wrong bit
    `gone`   the parts of snapshots that a ps has written disappear
    `at`     a host's process ends at a named moment of any process, as by `kill`
    """

    loss: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    mixed: float = 0.0
    breaks: float = 0.0
    kill: tuple[Outage, ...] = ()
    power: tuple[Outage, ...] = ()
    cut: tuple[Outage, ...] = ()
    hang: tuple[Outage, ...] = ()
    slow: tuple[Slow, ...] = ()
    full: tuple[Outage, ...] = ()
    torn: tuple[Outage, ...] = ()
    flip: tuple[Outage, ...] = ()
    gone: tuple[Outage, ...] = ()
    at: tuple[AtMoment, ...] = ()

    def __str__(self) -> str:
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                words += [f"{field.name}={each}" for each in value]
            elif value:
                words.append(f"{field.name}={value:g}")
        return ",".join(words)

    @property
    def outages(self) -> tuple[Outage, ...]:
        """All outages."""
        return (*self.kill, *self.power, *self.cut, *self.hang, *self.full, *self.torn, *self.flip, *self.gone)

    @property
    def end_s(self) -> float:
        """The time at which the last outage ends, in s."""
        return max((outage.end_s for outage in self.outages), default=0.0)


def check_hosts(faults: Faults, hosts: Sequence[str]) -> None:
    """Raise ValueError when a fault names an unknown host."""
    of_outages = (host for outage in faults.outages for host in outage.hosts)
    for host in (*of_outages, *(slow.host for slow in faults.slow), *(one.host for one in faults.at)):
        if host not in hosts:
            raise ValueError(f"a fault is of {host!r}, and the hosts are {', '.join(hosts)}")


def parse_faults(text: str) -> Faults:
    """Parse faults; raises ValueError, with the reason and an example, for malformed text."""
    faults = Faults()
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, equals, value = word.partition("=")
        try:
            if not equals or name not in _READERS:
                raise ValueError(f"there is no fault {name!r}")
            before, read = getattr(faults, name), _READERS[name](value)
        except ValueError as error:
            raise ValueError(
                f"fault {word!r}: {error}; give some of {', '.join(_READERS)}, such as loss=0.1, kill=worker:0@3.5+2, "
                "cut=worker:0/coordinator@2+6, hang=ps:0@5+1, slow=ps:1*20"
            ) from None
        changed: dict[str, Any] = {name: (*before, read) if isinstance(before, tuple) else read}
        faults = replace(faults, **changed)
    return faults


def _rate(value: str) -> float:
    rate = float(value)
    if not 0 <= rate < 1:
        raise ValueError(f"{rate:g} is not at least 0 and less than 1")
    return rate


def _outage(value: str) -> Outage:
    host, _, times = value.partition("@")
    at_s, _, for_s = times.partition("+")
    try:
        return Outage((host,), float(at_s), float(for_s))
    except ValueError:
        said = f"{value!r} is not of the form HOST@SECONDS+SECONDS: when it begins, and how long it lasts"
        raise ValueError(said) from None


def _cut(value: str) -> Outage:
    read = _outage(value)
    one, _, other = read.hosts[0].partition("/")
    if not other:
        raise ValueError(f"{one!r} names one host")
    return replace(read, hosts=(one, other))


def _at_moment(value: str) -> AtMoment:
    what, _, rest = value.partition("/")
    name, _, count = what.replace("-", " ").partition("*")
    host, _, for_s = rest.partition("+")
    if name not in ROLES:
        raise ValueError(f"there is no moment {name!r}; there are {', '.join(ROLES)}")
    return AtMoment(name, int(count or 1), host, float(for_s or 0))


def _slow(value: str) -> Slow:
    host, _, factor = value.partition("*")
    return Slow(host, float(factor))


_READERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("loss", "late", "twice", "mixed", "breaks"), _rate),
    **dict.fromkeys(("kill", "power", "hang", "full", "torn", "flip", "gone"), _outage),
    "cut": _cut,
    "slow": _slow,
    "at": _at_moment,
}


def drawn_faults(seed: int, hosts: Sequence[str], busy_s: float = 8.0) -> Faults:
    """Draw faults of any kind, the same for the same seed; timed faults begin within the first `busy_s`."""
    draw = random.Random(f"faults {seed}")

    def rate(most: float) -> float:
        return round(draw.random() * most, 2) if draw.random() < 0.4 else 0.0

    def some(most: int) -> range:
        return range(draw.choice([0, 0, *range(1, most + 1)]))

    def when() -> float:
        return round(draw.random() * busy_s, 2)

    def lasting() -> float:
        return round(draw.choice([0.05, 0.5, 3.0, 15.0]) * (0.5 + draw.random()), 2)

    def outages(most: int) -> tuple[Outage, ...]:
        return tuple(Outage((draw.choice(list(hosts)),), when(), lasting()) for _ in some(most))

    pairs = [sorted(draw.sample(list(hosts), 2)) for _ in some(2)]
    drawn = Faults(
        loss=rate(0.2),
        late=rate(0.3),
        twice=rate(0.3),
        mixed=rate(0.3),
        kill=outages(2),
        power=outages(1),
        cut=tuple(Outage((one, other), when(), lasting()) for one, other in pairs),
        hang=outages(1),
        slow=tuple(Slow(draw.choice(list(hosts)), draw.choice([5.0, 50.0])) for _ in some(1)),
    )
    return replace(drawn, breaks=rate(0.1))


def with_drawn_losses(faults: Faults, seed: int, ps: Sequence[str]) -> Faults:
    """Add drawn faults of the state of ps tasks: processes that end, and disks that fail; the same for the same seed.

    Most begin when the first snapshot should be complete.
    """
    draw = random.Random(f"losses {seed}")

    def outages(count: int, longest_s: float) -> tuple[Outage, ...]:
        return tuple(
            Outage((draw.choice(list(ps)),), round(2 + draw.random() * 7, 2), round(draw.random() * longest_s, 2))
            for _ in range(count)
        )

    kill, power = outages(draw.choice([1, 1, 2, 3]), 4.0), outages(draw.choice([0, 0, 1]), 4.0)
    disk: dict[str, Any] = {name: outages(draw.random() < 0.15, 6.0) for name in ("full", "torn", "flip", "gone")}
    return replace(faults, kill=(*faults.kill, *kill), power=(*faults.power, *power), **disk)
