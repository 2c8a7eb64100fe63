"""The training of `benchmarks.recovery` by TensorFlow's ParameterServerStrategy, with a CheckpointManager.

As its guide says, the coordinator's program restores the newest checkpoint when it starts, and ends with the
UnavailableError of a lost ps task; it is then started again. It saves once, after its first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import numpy as np
import tensorflow as tf

#: The steps before the checkpoint.
STEPS_BEFORE = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=("chief", "ps", "worker"), required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--spec", type=json.loads, required=True, help="addresses by job, as JSON")
    for name in ("tables", "rows", "columns", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ends", type=Path, required=True, help="folder for the times when steps have ended")
    parser.add_argument("--checkpoints", type=Path, required=True)
    given = parser.parse_args()
    spec = tf.train.ClusterSpec(given.spec)
    if given.job != "chief":
        server = tf.distribute.Server(spec, job_name=given.job, task_index=given.index, protocol="grpc", start=True)
        print("up", flush=True)
        server.join()
    with open(given.ends / f"chief.{os.getpid()}", "wb", buffering=0) as ends:
        train(given, spec, ends)


def train(given: argparse.Namespace, spec: tf.train.ClusterSpec, ends: object) -> None:
    """Train until a task is lost; note the end of each step of all workers."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    print("connected", flush=True)
    with strategy.scope():
        tables = [tf.Variable(tf.zeros((given.rows, given.columns))) for _ in range(given.tables)]
    checkpoint = tf.train.Checkpoint(tables=tables)
    manager = tf.train.CheckpointManager(checkpoint, str(given.checkpoints), max_to_keep=2)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
        print("restored", flush=True)

    def batches() -> tf.data.Dataset:
        indices = np.random.default_rng(0).integers(given.rows, size=(1000, given.batch), dtype=np.int32)
        return tf.data.Dataset.from_tensor_slices(indices).repeat()

    @tf.function
    def step(iterator: object) -> tf.Tensor:
        def replica(indices: tf.Tensor) -> tf.Tensor:
            found = [tf.gather(table, indices) for table in tables]
            for table, values in zip(tables, found, strict=True):
                table.scatter_add(tf.IndexedSlices(0.001 * (1.0 - values), indices))
            return tf.add_n([tf.reduce_mean(values) for values in found])

        return strategy.run(replica, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    number, workers = 0, len(spec.job_tasks("worker"))
    while True:
        for _ in range(workers):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        ends.write(np.float64(time.monotonic()).tobytes())
        number += 1
        if number == STEPS_BEFORE and not manager.latest_checkpoint:
            manager.save()
            print("saved", flush=True)


if __name__ == "__main__":
    main()
