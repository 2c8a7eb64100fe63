"""Measure how fast files of Parquet, Arrow and TFRecord are read into shuffled batches.

`--rows` rows of a string, an integer, a label and 64 floats are written as each format, in files of 50,000 rows, and
read as batches of 512 in random order within 10,000 rows. A round reads each once in a new process, in random order.
The time begins after the imports, with files in the page cache. `dflow, by readers` has two processes that serve the
batches to a third. `string ids` reads the strings as ids.

`--beside PYTHON` names an environment with tensorflow, grain, torch, tfrecord and datasets, which read the same files
as their documents show: `tf.data` TFRecord; Grain Parquet and TFRecord; PyTorch's DataLoader, with two processes, the
`tfrecord` package, and Hugging Face's datasets of Parquet (streamed) and Arrow (mapped).
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks._paired import in_turn, options, publish
from tests.dflow.input.example_records import example, write_records

ROWS, FILE, GROUP, WIDTH = 200_000, 50_000, 10_000, 64
#: Longest time of one process, in s.
RUN_S = 900
#: Formats that each library reads, by the name of its function in `_readers_peers.py`.
PEERS = {
    "tf.data": ("tfrecord",),
    "grain": ("parquet", "tfrecord"),
    "torch": ("parquet", "arrow", "tfrecord"),
}
ROOT = Path(__file__).parents[1]


def main() -> None:
    given = options(__doc__, rounds=3, rows=ROWS, beside=None)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        files = Path(folder)
        write(files, given.rows)
        ways: dict[str, Callable[[], float]] = {}
        for kind in ("parquet", "arrow", "tfrecord"):
            for way in ("dflow", "dflow, string ids", "dflow, by readers"):
                ways[f"{kind}: {way}"] = partial(read_by, sys.executable, "_readers_dflow", way, kind, files)
        for name, kinds in PEERS.items() if given.beside else ():
            for kind in kinds:
                ways[f"{kind}: {name}"] = partial(read_by, given.beside, "_readers_peers", name, kind, files)
        found = in_turn(ways, given.rounds)
        rows = []
        for way, took in sorted(found.items()):
            size = sum(path.stat().st_size for path in files.glob(f"*.{way.partition(':')[0]}"))
            second = statistics.median(took)
            rows.append({"reads": way, "examples/s": given.rows / second, "MB/s": size / 1e6 / second, "s": second})
        publish("readers", rows, as_json=given.json)


def write(folder: Path, rows: int) -> None:
    """Write the rows as each format."""
    import pyarrow as pa
    from pyarrow import parquet

    draw = np.random.default_rng(0)
    for first in range(0, rows, FILE):
        count = min(FILE, rows - first)
        user, floats = draw.integers(20_000, size=count), draw.normal(size=(count, WIDTH)).astype(np.float32)
        names, label = [f"user-{number:06}" for number in user], draw.integers(2, size=count).astype(np.float32)
        number = np.arange(first, first + count)
        table = pa.table(
            {
                "user": names,
                "number": number,
                "label": label,
                "x": pa.FixedSizeListArray.from_arrays(floats.ravel(), WIDTH),
            }
        )
        parquet.write_table(table, folder / f"{first:09}.parquet", row_group_size=GROUP)
        with pa.ipc.new_stream(str(folder / f"{first:09}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=GROUP)
        records = (
            example({"user": [name.encode()], "number": [one], "label": [float(value)], "x": vector.tolist()})
            for name, one, value, vector in zip(names, number.tolist(), label, floats, strict=True)
        )
        write_records(folder / f"{first:09}.tfrecord", records)


def read_by(python: str, module: str, way: str, kind: str, folder: Path) -> float:
    """Read all files of a kind once in a new process; return the time, in s."""
    command = [python, str(ROOT / "benchmarks" / f"{module}.py"), way, kind, str(folder)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S, check=False)
    if found := re.findall(r'\{"s": .*\}', ended.stdout):
        return float(json.loads(found[-1])["s"])
    raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")


if __name__ == "__main__":
    main()
