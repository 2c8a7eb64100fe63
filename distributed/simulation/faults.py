"""The faults of a schedule as a value, which is formatted, parsed, or drawn from a seed.

Its text is the argument of `dflow simulate --faults`: words separated by commas, such as
`loss=0.1,late=0.2,twice=0.05,kill=worker:0@3.5+2,power=ps:1@4+3,cut=worker:0/coordinator@2+6,hang=ps:0@5+1,slow=ps:1*20`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

COORDINATOR = "coordinator"


@dataclass(frozen=True)
class Stop:
    """The process on `host` ends at `at_s`, and another is started `back_after_s` later.

    The system closes the connections of a killed process; a power loss notifies no peer. A coordinator loses power
    right after its next write to its store, before it sends any result of that write.
    """

    host: str
    at_s: float
    back_after_s: float

    def __str__(self) -> str:
        return f"{self.host}@{self.at_s:g}+{self.back_after_s:g}"


@dataclass(frozen=True)
class Cut:
    """No packet passes between two hosts for `for_s`, from `at_s` on."""

    one: str
    other: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.one}/{self.other}@{self.at_s:g}+{self.for_s:g}"


@dataclass(frozen=True)
class Hang:
    """The process on `host` does nothing for `for_s`, from `at_s` on, and then continues."""

    host: str
    at_s: float
    for_s: float

    def __str__(self) -> str:
        return f"{self.host}@{self.at_s:g}+{self.for_s:g}"


@dataclass(frozen=True)
class Slow:
    """Everything that `host` does takes `factor` times as long."""

    host: str
    factor: float

    def __str__(self) -> str:
        return f"{self.host}*{self.factor:g}"


@dataclass(frozen=True)
class Faults:
    """The faults of one schedule.

    `loss`   the fraction of packets that are lost and resent
    `late`   the fraction of packets that take up to a second longer
    `twice`  the fraction of values and cancellations between tasks that arrive twice
    `mixed`  the fraction of these that later messages may overtake
    `breaks` the fraction of packets on which their stream breaks; the connection continues over a new stream
    """

    loss: float = 0.0
    late: float = 0.0
    twice: float = 0.0
    mixed: float = 0.0
    breaks: float = 0.0
    kill: tuple[Stop, ...] = ()
    power: tuple[Stop, ...] = ()
    cut: tuple[Cut, ...] = ()
    hang: tuple[Hang, ...] = ()
    slow: tuple[Slow, ...] = ()

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
    def end_s(self) -> float:
        """The time at which the last fault of limited duration ends, in s."""
        stops = [stop.at_s + stop.back_after_s for stop in (*self.kill, *self.power)]
        spans = [cut.at_s + cut.for_s for cut in self.cut] + [hang.at_s + hang.for_s for hang in self.hang]
        return max([0.0, *stops, *spans])


def check_hosts(faults: Faults, hosts: Sequence[str]) -> None:
    """Raise ValueError when a fault names an unknown host."""
    named = [stop.host for stop in (*faults.kill, *faults.power)] + [hang.host for hang in faults.hang]
    named += [slow.host for slow in faults.slow] + [host for cut in faults.cut for host in (cut.one, cut.other)]
    for host in named:
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
            faults = _READERS[name](faults, name, value)
        except ValueError as error:
            raise ValueError(
                f"fault {word!r}: {error}; give some of {', '.join(_READERS)}, such as loss=0.1, kill=worker:0@3.5+2, "
                "cut=worker:0/coordinator@2+6, hang=ps:0@5+1, slow=ps:1*20"
            ) from None
    return faults


def _rate(faults: Faults, name: str, value: str) -> Faults:
    rate = float(value)
    if not 0 <= rate < 1:
        raise ValueError(f"{rate:g} is not at least 0 and less than 1")
    changed: dict[str, Any] = {name: rate}
    return replace(faults, **changed)


def _stop(faults: Faults, name: str, value: str) -> Faults:
    changed: dict[str, Any] = {name: (*getattr(faults, name), Stop(*_timed(value)))}
    return replace(faults, **changed)


def _hang(faults: Faults, _: str, value: str) -> Faults:
    return replace(faults, hang=(*faults.hang, Hang(*_timed(value))))


def _cut(faults: Faults, _: str, value: str) -> Faults:
    hosts, at_s, for_s = _timed(value)
    one, _, other = hosts.partition("/")
    if not other:
        raise ValueError(f"{hosts!r} names one host")
    return replace(faults, cut=(*faults.cut, Cut(one, other, at_s, for_s)))


def _slow(faults: Faults, _: str, value: str) -> Faults:
    host, _, factor = value.partition("*")
    return replace(faults, slow=(*faults.slow, Slow(host, float(factor))))


def _timed(value: str) -> tuple[str, float, float]:
    host, _, times = value.partition("@")
    at_s, _, for_s = times.partition("+")
    try:
        return host, float(at_s), float(for_s)
    except ValueError:
        said = f"{value!r} is not of the form HOST@SECONDS+SECONDS: when it begins, and how long it lasts"
        raise ValueError(said) from None


_READERS = {
    **dict.fromkeys(("loss", "late", "twice", "mixed", "breaks"), _rate),
    **dict.fromkeys(("kill", "power"), _stop),
    "cut": _cut,
    "hang": _hang,
    "slow": _slow,
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

    pairs = [sorted(draw.sample(list(hosts), 2)) for _ in some(2)]
    drawn = Faults(
        loss=rate(0.2),
        late=rate(0.3),
        twice=rate(0.3),
        mixed=rate(0.3),
        kill=tuple(Stop(draw.choice(list(hosts)), when(), lasting()) for _ in some(2)),
        power=tuple(Stop(draw.choice(list(hosts)), when(), lasting()) for _ in some(1)),
        cut=tuple(Cut(one, other, when(), lasting()) for one, other in pairs),
        hang=tuple(Hang(draw.choice(list(hosts)), when(), lasting()) for _ in some(1)),
        slow=tuple(Slow(draw.choice(list(hosts)), draw.choice([5.0, 50.0])) for _ in some(1)),
    )
    return replace(drawn, breaks=rate(0.1))
