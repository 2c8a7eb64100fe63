"""Reads files by other libraries for `benchmarks.readers`: prints the time of all batches."""

from __future__ import annotations

import glob
import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

BATCH, WINDOW, PROCESSES, WIDTH = 512, 10_000, 2, 64


def tf_data(files: list[str], kind: str) -> Iterable[Any]:
    import tensorflow as tf

    spec = {
        "user": tf.io.FixedLenFeature([], tf.string),
        "number": tf.io.FixedLenFeature([], tf.int64),
        "label": tf.io.FixedLenFeature([], tf.float32),
        "x": tf.io.FixedLenFeature([WIDTH], tf.float32),
    }
    data = tf.data.TFRecordDataset(files).shuffle(WINDOW).batch(BATCH)
    data = data.map(lambda records: tf.io.parse_example(records, spec), num_parallel_calls=tf.data.AUTOTUNE)
    return data.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def grain(files: list[str], kind: str) -> Iterable[Any]:
    import grain
    import numpy as np

    made = grain.experimental
    reader = made.ParquetIterDataset if kind == "parquet" else made.TFRecordIterDataset
    data = made.InterleaveIterDataset([reader(path) for path in files], cycle_length=len(files))
    if kind == "tfrecord":
        from tensorflow.core.example.example_pb2 import Example

        def parsed(record: bytes) -> dict[str, Any]:
            features = Example.FromString(record).features.feature
            return {
                "user": features["user"].bytes_list.value[0],
                "number": features["number"].int64_list.value[0],
                "label": np.float32(features["label"].float_list.value[0]),
                "x": np.array(features["x"].float_list.value, np.float32),
            }

        data = data.map(parsed)
    return iter(made.WindowShuffleIterDataset(data, window_size=WINDOW, seed=0).batch(BATCH))


def torch(files: list[str], kind: str) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    if kind == "tfrecord":
        from tfrecord.torch.dataset import MultiTFRecordDataset, TFRecordDataset  # noqa: F401
        from torch.utils.data import ChainDataset

        kinds = {"user": "byte", "number": "int", "label": "float", "x": "float"}
        parts = [TFRecordDataset(path, None, kinds, shuffle_queue_size=WINDOW) for path in files]
        return DataLoader(ChainDataset(parts), batch_size=BATCH)
    import datasets

    datasets.disable_progress_bars()
    if kind == "arrow":
        data = datasets.concatenate_datasets([datasets.Dataset.from_file(path) for path in files])
        return DataLoader(data.with_format("numpy"), batch_size=BATCH, shuffle=True, num_workers=PROCESSES)
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    shuffled = stream.shuffle(seed=0, buffer_size=WINDOW).with_format("numpy")
    return DataLoader(shuffled, batch_size=BATCH, num_workers=PROCESSES)


WAYS: dict[str, Callable[[list[str], str], Iterable[Any]]] = {"tf.data": tf_data, "grain": grain, "torch": torch}


def main() -> None:
    way, kind, folder = sys.argv[1:]
    if way != "torch" or kind == "tfrecord":
        __import__({"tf.data": "tensorflow"}.get(way, way))
    else:
        __import__("datasets")
        __import__("torch")
    files = sorted(glob.glob(f"{folder}/*.{kind}"))
    started = time.perf_counter()
    count = sum(len(batch["number"]) for batch in WAYS[way](files, kind))
    assert count, "expected rows"
    print("\n" + json.dumps({"s": time.perf_counter() - started, "rows": count}))


if __name__ == "__main__":
    main()
