"""How many words a second does an LSTM language model train with 1, 2 and 4 ps tasks, by full and sampled softmax?

Section 6.4 of the OSDI 2016 paper: a vocabulary of 40,000 words, LSTM-512, the softmax's weights divided over the ps
tasks, which compute the full softmax; the sampled one draws 512 classes for each batch. Here one worker has batches of
8 texts of 16 words, and all processes share the cores of one machine: ps tasks add no processors, and the figure that
carries over is the work. `multiplications` counts those of the softmax's matrix products in a step, forward and
backward, and `moved KB` the bytes of values that the worker sends and receives. `speed / full` compares with the full
softmax of as many ps tasks, round by round.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks._launched import figures_in, launched
from benchmarks._paired import in_turn, median_ratio, options, publish

PS = (1, 2, 4)
SAMPLES = 512
RUN_S = 900


def main() -> None:
    given = options(__doc__, words=40_000, width=512, batch=8, length=16, steps=10, rounds=3)
    ways = {(ps, softmax): partial(run, ps, softmax, given) for ps in PS for softmax in ("full", "sampled")}
    found = in_turn(ways, given.rounds)
    rows = []
    for ps, softmax in ways:
        runs = found[ps, softmax]
        times, full = ([statistics.median(one["times"]) for one in each] for each in (runs, found[ps, "full"]))
        ratio, low, high = median_ratio(full, times)
        classes = given.words if softmax == "full" else SAMPLES + 1
        rows.append(
            {
                "ps": ps,
                "softmax": softmax,
                "step ms": 1e3 * statistics.median(times),
                "words/s": given.batch * given.length / statistics.median(times),
                "speed / full": ratio,
                "p10": low,
                "p90": high,
                "multiplications": 3 * given.batch * given.length * given.width * classes,
                "moved KB": statistics.median(one["moved"] for one in runs) / 1e3,
            }
        )
    publish("language_model", rows, as_json=given.json)


def run(ps: int, softmax: str, given: Any) -> dict[str, Any]:
    """Train on `ps` tasks, and return the worker's figures."""
    sizes = [
        word
        for name in ("words", "width", "batch", "length", "steps")
        for word in (f"--{name}", str(getattr(given, name)))
    ]
    words = [*sizes, "--samples", str(SAMPLES), "--softmax", softmax]
    ended = launched("_language_model_worker.py", words, ps=ps, workers=1, timeout_s=RUN_S)
    return figures_in(ended.stdout + ended.stderr)


if __name__ == "__main__":
    main()
