"""The step of `benchmarks.embedding` by TensorFlow, in an environment with it and without JAX; prints times as JSON.

Graph mode and its own sparse updates: gradients of lookups are `IndexedSlices`, which the v1 optimizers sum by index
and apply to rows. Lazy Adam consists of gathers and scatters, as in TensorFlow Addons.
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

COLUMNS = 64
LOOKUPS = 1024
WARM_UP = 10
v1 = tf.compat.v1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("sgd", "adagrad", "lazy_adam"), required=True)
    parser.add_argument("--millions", type=int, nargs="+", required=True)
    for name in ("steps", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--job", choices=("ps", "worker"))
    parser.add_argument("--index", type=int, default=0)
    for name in ("ps", "workers"):
        parser.add_argument(f"--{name}", nargs="+", default=[], metavar="ADDRESS")
    given = parser.parse_args()
    target = ""
    if given.job is not None:
        spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
        server = v1.train.Server(spec, job_name=given.job, task_index=given.index)
        if given.job == "ps":
            server.join()
        target = server.target
    with tf.Graph().as_default():
        run(target, given)


def run(target: str, given: argparse.Namespace) -> None:
    """Train on the tables of each size, in alternating rounds."""
    inputs = [v1.placeholder(tf.int32, [LOOKUPS]) for _ in range(2)] + [v1.placeholder(tf.float32, [LOOKUPS])]
    steps = {millions: make_step(given, millions, inputs) for millions in given.millions}
    draw = np.random.default_rng(0)
    with v1.Session(target) as session:
        session.run(v1.global_variables_initializer())

        def one(millions: int) -> float:
            ids = [draw.integers(rows_of(millions), size=LOOKUPS, dtype=np.int32) for _ in range(2)]
            feed = dict(zip(inputs, [*ids, draw.normal(size=LOOKUPS).astype(np.float32)], strict=True))
            started = time.perf_counter()
            session.run(steps[millions], feed)
            return time.perf_counter() - started

        for millions in given.millions:
            for _ in range(WARM_UP):
                one(millions)
        times = {millions: [] for millions in given.millions}
        for _ in range(given.rounds):
            for millions in given.millions:
                times[millions].append([one(millions) for _ in range(given.steps)])
    print("measured " + json.dumps({"times": times}), flush=True)


def rows_of(millions: int) -> int:
    return millions * 1_000_000 // COLUMNS // 2


def variable(given: argparse.Namespace, number: int, millions: int, initial: float) -> tf.Variable:
    device = f"/job:ps/task:{number}" if given.ps else "/cpu:0"
    with tf.device(device):
        shape = (rows_of(millions), COLUMNS)
        return v1.get_variable(
            f"v{number}_{millions}_{len(v1.global_variables())}",
            shape,
            initializer=v1.constant_initializer(initial),
            use_resource=True,
        )


def make_step(given: argparse.Namespace, millions: int, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    users, items, wanted = inputs
    tables = [variable(given, number, millions, 0.1) for number in range(2)]
    rows = [tf.nn.embedding_lookup(table, ids) for table, ids in zip(tables, (users, items), strict=True)]
    loss = tf.reduce_mean((tf.reduce_sum(rows[0] * rows[1], axis=1) - wanted) ** 2)
    gradients = tf.gradients(loss, tables)
    if given.rule == "lazy_adam":
        updates = [adam(given, number, millions, tables[number], gradients[number]) for number in range(2)]
        return [loss, tf.group(*updates)]
    rules = {"sgd": v1.train.GradientDescentOptimizer, "adagrad": v1.train.AdagradOptimizer}
    return [loss, rules[given.rule](0.01).apply_gradients(zip(gradients, tables, strict=True))]


def adam(
    given: argparse.Namespace, number: int, millions: int, table: tf.Variable, gradient: tf.IndexedSlices
) -> tf.Operation:
    mean, square = (variable(given, number, millions, 0.0) for _ in range(2))
    with tf.device(table.device):
        ids, where = tf.unique(gradient.indices)
        summed = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(ids))
        new_mean = 0.9 * tf.gather(mean, ids) + 0.1 * summed
        new_square = 0.999 * tf.gather(square, ids) + 0.001 * summed**2
        step = 0.01 * new_mean / (tf.sqrt(new_square) + 1e-8)
        return tf.group(
            mean.scatter_update(tf.IndexedSlices(new_mean, ids)),
            square.scatter_update(tf.IndexedSlices(new_square, ids)),
            table.scatter_sub(tf.IndexedSlices(step, ids)),
        )


if __name__ == "__main__":
    main()
