"""The null step by TensorFlow's own runtime, in an environment with TensorFlow and without JAX; prints times as JSON.

Graph mode, between-graph replication, variables on ps tasks, gRPC: the runtime that the paper measured, in its current
release. The barrier is two queues on ps task 0, as in TensorFlow's own synchronous replicas: each worker enqueues a
token after its update, and worker 0 returns one token to each other worker when it has all of them. A single worker has
no barrier.
"""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

COLUMNS = 256
ROWS_FETCHED = 32
WARM_UP = 30
v1 = tf.compat.v1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=("ps", "worker"), required=True)
    parser.add_argument("--kind", choices=("scalar", "dense", "sparse"), required=True)
    for name in ("index", "mb", "steps", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = parser.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    server = v1.train.Server(spec, job_name=given.job, task_index=given.index)
    if given.job == "ps":
        server.join()
    with tf.Graph().as_default():
        run(server, given)


def run(server: v1.train.Server, given: argparse.Namespace) -> None:
    """Run the steps and print their times."""
    shape = shard_shape(given)
    shards, counts = [], []
    for index in range(len(given.ps)):
        with tf.device(f"/job:ps/task:{index}"):
            shards.append(variable(f"shard_{index}", shape))
            counts.append(variable(f"count_{index}", ()))
    indices = v1.placeholder(tf.int32, [ROWS_FETCHED // len(given.ps)])
    with tf.device(f"/job:worker/task:{given.index}"):
        fetched = [tf.gather(shard, indices) if given.kind == "sparse" else shard.read_value() for shard in shards]
        fetched = [tf.identity(value) for value in fetched]
        seen = tf.add_n([tf.reshape(value, [-1])[0] for value in fetched])
    updates = [count.assign_add(seen * 0 + 1, read_value=False) for count in counts]
    step = barrier(updates, given)
    ready = v1.report_uninitialized_variables()
    with v1.Session(server.target) as session:
        if given.index == 0:
            session.run(v1.global_variables_initializer())
        while len(session.run(ready)):
            time.sleep(0.1)
        order = np.random.default_rng(0)

        def one() -> float:
            feed = {}
            if given.kind == "sparse":
                feed[indices] = order.integers(shape[0], size=ROWS_FETCHED // len(given.ps), dtype=np.int32)
            started = time.perf_counter()
            session.run([step, seen], feed)
            return time.perf_counter() - started

        for _ in range(WARM_UP):
            one()
        times = [[one() for _ in range(given.steps)] for _ in range(given.rounds)]
        print("times " + json.dumps(times), flush=True)


def variable(name: str, shape: tuple[int, ...]) -> tf.Variable:
    """A variable of zeros."""
    return v1.get_variable(name, shape, initializer=v1.zeros_initializer(), use_resource=True)


def barrier(updates: list[tf.Operation], given: argparse.Namespace) -> tf.Operation:
    """An op that completes when all workers have done `updates`."""
    count = len(given.workers)
    if count == 1:
        return tf.group(*updates)
    with tf.device("/job:ps/task:0"):
        arrived = tf.queue.FIFOQueue(count, tf.int32, (), shared_name="arrived")
        tokens = tf.queue.FIFOQueue(count, tf.int32, (), shared_name="tokens")
    with tf.control_dependencies(updates):
        handed_in = arrived.enqueue(0)
    with tf.control_dependencies([handed_in]):
        if given.index:
            return tf.group(tokens.dequeue())
        return tokens.enqueue_many(arrived.dequeue_many(count)[1:])


def shard_shape(given: argparse.Namespace) -> tuple[int, ...]:
    """The f32 shape of the variable on each ps task."""
    if given.kind == "scalar":
        return ()
    numbers = given.mb * 1_000_000 // 4 // len(given.ps)
    return (numbers,) if given.kind == "dense" else (numbers // COLUMNS, COLUMNS)


if __name__ == "__main__":
    main()
