"""Measure steps over tasks on a network with delay, with a limited rate, and with loss.

Each task runs on a separate host, made of Linux namespaces on this machine, with kernel TCP between the hosts; the
coordinator shares the host of the first ps task. This needs root, and Linux.

*round trips*: a training step (20 variables of 64 x 64, Adam) at several delays. The line by least squares through the
lower quartiles of the step times, over the measured round-trip times of a small message, has as its slope the number of
round trips of a step, and as its value at 0 the *rest*; their spread is that of lines through rounds drawn with
repetition. *sockets* gets the values and sends the gradients over plain sockets. *step* is a `dflow.jit` function,
*Async* and *Sync* are the strategies; a worker of *Async* claims 16 steps at a time by one more round trip, which no
quartile shows. *lookups*, *lookahead* and *prefetch* are steps of `Async` for the click-through model of `_clicks`: the
second with `lookahead=True`, the third with `prefetch=1` too. Their own table has the ratios of the step times at the
longest delay to those of *lookups*, round by round. *losses* has the times with 1 ms of delay where the link loses
packets. *rates*: steps on variables of 100 MB in all; *fetch* reads them, *train* sends as many bytes back. *TLS* is
plain sockets under TLS 1.3.

All tasks share a secret, so their connections are under TLS. Delay and loss are made by a process that passes packets
on (`_slow_link`), the rate by the kernel. *links* has what that process could carry at no delay, and how late it passed
packets on.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._hosts import Host, connect_at_rate, dropped, move, why_not
from benchmarks._launched import ROOT
from benchmarks._paired import median_ratio, options, publish
from benchmarks._slow_link import MTU
from dflow.cli.certs import make_secret

RUN_S, STOP_S = 600.0, 10.0
#: One-way delays, in s, and losses at the delay `LOSSY_S`.
DELAYS_S = (1e-4, 1e-3, 3e-3, 1e-2)
LOSSES, LOSSY_S = (0.001, 0.01), 1e-3
#: Clusters of ps tasks and workers, with the ways to do a step on each.
LOOKUPS = ("lookups", "lookahead", "prefetch")
CLUSTERS = {(1, 1): ("step", "Async"), (2, 1): ("step", "Async", *LOOKUPS), (1, 2): ("Sync",), (2, 2): ("Sync",)}
GIGABITS = (1, 10)
#: Number of times that the rounds are drawn again, for the spread of the lines.
RESAMPLED = 300

Found = list[dict[str, Any]]


def main() -> None:
    given = options(__doc__, part=("all", "delays", "rates"), rounds=7, steps=20, mb=100)
    with tempfile.TemporaryDirectory(prefix="dflow-network-") as name:
        folder = Path(name)
        if reason := why_not(folder):
            print(f"network: skipped, since {reason}")
            return
        make_secret(folder / "secret")
        if given.part != "rates":
            delays(folder, given.rounds, given.steps, as_json=given.json)
        if given.part != "delays":
            publish("network_rates", at_rates(folder, given.rounds, given.mb), as_json=given.json)


def delays(folder: Path, rounds: int, steps: int, *, as_json: bool) -> None:
    """Measure and print the round trips of a step, and its times with loss."""
    trips: Found = []
    lookups: Found = []
    losses: Found = []
    links: Found = []
    for (ps, workers), strategies in CLUSTERS.items():
        found, link = with_delays(folder, ps, workers, strategies, rounds, steps)
        tasks = {"ps": ps, "workers": workers}
        for way in (*strategies, "sockets"):
            trips.append({"step": way, **tasks, **fitted(found, way)})
            losses.append({"step": way, **tasks, **lossy(found, way)})
        lookups += [{"step": way, **tasks, **to_lookups(found, way)} for way in strategies if way in LOOKUPS]
        links.append({**tasks, **link})
    publish("network_round_trips", trips, as_json=as_json)
    publish("network_lookups", lookups, as_json=as_json)
    publish("network_losses", losses, as_json=as_json)
    publish("network_links", links, as_json=as_json)


def fitted(found: Found, way: str) -> dict[str, Any]:
    """Return the step time for each delay, and the slope and the rest of the line through them, with their spread."""
    by_delay = [[each for each in found if (each["delay"], each["loss"]) == (delay, 0.0)] for delay in DELAYS_S]
    trips = np.array([[each["trip"] for each in rounds] for rounds in by_delay])
    times = np.array([[each["times"][way] for each in rounds] for rounds in by_delay])
    rounds = times.shape[1]
    slope, rest = line_through(trips, times)
    drawn = np.random.default_rng(0).integers(rounds, size=(RESAMPLED, rounds))
    lines = [line_through(trips[:, chosen], times[:, chosen]) for chosen in drawn]
    (slope_low, rest_low), (slope_high, rest_high) = np.percentile(lines, [10, 90], axis=0)
    row = {f"{1e3 * delay:g} ms": 1e3 * time for delay, time in zip(DELAYS_S, step_times(times), strict=True)}
    row |= {"round trips": slope, "p10": slope_low, "p90": slope_high}
    return row | {"rest ms": 1e3 * rest, " p10": 1e3 * rest_low, " p90": 1e3 * rest_high}


def to_lookups(found: Found, way: str) -> dict[str, Any]:
    """Return the step time at the longest delay, and its ratio to that of *lookups*."""
    longest = [each["times"] for each in found if (each["delay"], each["loss"]) == (max(DELAYS_S), 0.0)]
    times, plain = ([statistics.median(rounds[name]) for rounds in longest] for name in (way, "lookups"))
    ratio, low, high = median_ratio(times, plain)
    return {"ms": 1e3 * statistics.median(times), "/ lookups": ratio, "p10": low, "p90": high}


def line_through(trips: Any, times: Any) -> Any:
    """Return slope and value at 0 of the line by least squares; axes: delays, rounds, and for `times` steps."""
    return np.polyfit(np.median(trips, 1), step_times(times), 1)


def step_times(times: Any) -> Any:
    """Return the lower quartile for each delay: other processes on the processor can only lengthen a step."""
    return np.percentile(times, 25, axis=(1, 2))


def lossy(found: Found, way: str) -> dict[str, Any]:
    """Return the step times at each loss, and their ratio to those without, round by round."""
    by_loss = {
        loss: [each["times"][way] for each in found if (each["delay"], each["loss"]) == (LOSSY_S, loss)]
        for loss in (0.0, *LOSSES)
    }
    without = [statistics.mean(times) for times in by_loss[0.0]]
    row: dict[str, Any] = {}
    for number, (loss, rounds) in enumerate(by_loss.items()):
        every = sorted(time for times in rounds for time in times)
        what, pad = f"{100 * loss:g}%", " " * number
        row |= {f"{what} ms": 1e3 * statistics.median(every), f"{pad}mean": 1e3 * statistics.mean(every)}
        row |= {f"{pad}p99": 1e3 * every[len(every) * 99 // 100]}
        if loss:
            ratio, low, high = median_ratio([statistics.mean(times) for times in rounds], without)
            row |= {f"{what} / 0%": ratio, f"{pad}p10": low, f"{pad}p90": high}
    return row


def at_rates(folder: Path, rounds: int, mb: int) -> Found:
    """Return a row for each rate and step."""
    rows: Found = []
    for gigabits in GIGABITS:
        times = with_rate(folder, gigabits, rounds, mb)
        for way in (name for name in times if name.split()[0] in ("fetch", "train")):
            kind, variables = way.split()
            moved_mb = mb * (1 if kind == "fetch" else 2)
            row: dict[str, Any] = {"Gbit/s": gigabits, "step": kind, "variables": int(variables)}
            row["link MB/s"] = gigabits * 1000 / 8
            for name, timed in (("sockets", f"sockets {kind}"), ("TLS", f"TLS {kind}"), ("dflow", way)):
                row[f"{name} MB/s"] = moved_mb / statistics.median(times[timed])
            for name in ("sockets", "TLS"):
                ratio, low, high = median_ratio(times[f"{name} {kind}"], times[way])
                pad = " " * len(name)
                row |= {f"of {name}": ratio, f"{pad}p10": low, f"{pad}p90": high}
            rows.append(row)
    return rows


def with_delays(
    folder: Path, ps: int, workers: int, strategies: Sequence[str], rounds: int, steps: int
) -> tuple[Found, dict[str, Any]]:
    """Run a cluster over a link with delays and losses; return what worker 0 found, and the state of the link."""
    links = [(delay, 0.0) for delay in DELAYS_S] + [(LOSSY_S, loss) for loss in LOSSES]
    words = ["--steps", str(steps), "--links", json.dumps(links), "--strategies", *strategies]
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(Host(number, folder)) for number in range(ps + workers)]
        control = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)), "control")
        words += ["--control", str(control)]
        with slow_link(hosts, control) as (link, devices):
            measured = run_cluster(hosts, folder, ps, workers, [*words, "--rounds", str(rounds)])
            lost = sum(dropped([host], device) for host, device in zip(hosts, devices, strict=True))
            output, _ = link.communicate("", timeout=STOP_S)
        passed, found = json.loads(output), measured["rounds"]
        return found, {
            "security": "shared secret",
            "congestion control": hosts[0].congestion,
            "MTU": MTU,
            "trip ms, by delay": " ".join(
                f"{1e3 * statistics.median(each['trip'] for each in found if each['delay'] == delay):.3g}"
                for delay in DELAYS_S
            ),
            "carries MB/s": measured["carries"],
            "packets": passed["packets"],
            "late us": passed["late us"][0],
            "p99": passed["late us"][1],
            "dropped at the hosts": lost,
        }


@contextlib.contextmanager
def slow_link(hosts: Sequence[Host], control: Path) -> Iterator[tuple[subprocess.Popen[str], Sequence[str]]]:
    """Connect the hosts by a process with the control socket `control`; yield it, and the hosts' devices."""
    link = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._slow_link", str(len(hosts)), str(control)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert link.stdout is not None
        devices: list[str] = json.loads(link.stdout.readline())
        for host, device in zip(hosts, devices, strict=True):
            move(device, host)
            host.use(device, MTU)
        yield link, devices
    finally:
        link.kill()
        link.wait()


def with_rate(folder: Path, gigabits: float, rounds: int, mb: int) -> Mapping[str, list[float]]:
    """Run a ps task and a worker over a link of this rate; return the times of steps by way, in s."""
    with Host(0, folder) as server, Host(1, folder) as client:
        connect_at_rate(server, client, gigabits)
        words = ["--mb", str(mb), "--rounds", str(rounds), "--steps", "1", "--strategies", "step"]
        found: Mapping[str, list[float]] = run_cluster([server, client], folder, 1, 1, words)
        return found


def run_cluster(hosts: Sequence[Host], folder: Path, ps: int, workers: int, words: Sequence[str]) -> Any:
    """Run the cluster with one task on each host, the ps tasks first; return what worker 0 found."""
    addresses = [host.address for host in hosts]
    environment = {
        "DFLOW_COORDINATOR": f"{addresses[0]}:7711",
        "DFLOW_SECRET_FILE": str(folder / "secret"),
        "DFLOW_RUN_DIR": str(folder),
    }
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "output").open("w+"))
        jobs = ["--job", f"ps={ps}", "--job", f"worker={workers}"]
        address = environment["DFLOW_COORDINATOR"]
        hosts[0].start("-m", "dflow", "coordinator", "--address", address, *jobs, output=log, **environment)
        for index in range(ps):
            hosts[index].start("-m", "benchmarks._plain_exchange", addresses[index], output=log)
            hosts[index].start("-m", "dflow", "task", "--index", str(index), output=log, **environment)
        script = ["-m", "benchmarks._network_worker", *words, "--servers", *addresses[:ps]]
        running = [
            hosts[ps + index].start(
                *script, output=log if index else subprocess.PIPE, **environment, DFLOW_INDEX=str(index)
            )
            for index in range(workers)
        ]
        try:
            output, _ = running[0].communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired as error:
            output = f"{error}\n{(error.stdout or b'').decode()}"
        lines = [line for line in output.splitlines() if line.startswith("found ")]
        if not lines:
            log.seek(0)
            raise SystemExit(f"the cluster failed:\n{log.read()}{output}")
        for worker in running[1:]:
            worker.wait(STOP_S)
        return json.loads(lines[-1].removeprefix("found "))


if __name__ == "__main__":
    main()
