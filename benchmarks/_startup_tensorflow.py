"""The start of `benchmarks.startup` by TensorFlow's own runtime, in graph mode; prints times as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

SHAPE = (64, 64)
BATCH = 8
v1 = tf.compat.v1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=("ps", "worker"), required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--variables", type=int, default=0)
    parser.add_argument("--began", type=float, default=0.0, help="when the process was started, by `time.time`")
    parser.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = parser.parse_args()
    times = {"imports": time.time() - given.began}
    processor = {"imports": time.process_time()}
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    server = v1.train.Server(spec, job_name=given.job, task_index=given.index)
    if given.job == "ps":
        print("up", flush=True)
        server.join()

    def lap(what: str) -> None:
        times[what] = time.time() - given.began - sum(times.values())
        processor[what] = time.process_time() - sum(processor.values())

    lap("join")
    with tf.Graph().as_default():
        batch = v1.placeholder(tf.float32, (BATCH, SHAPE[0]))
        train, loss = graph(given, batch)
        lap("graph")
        with v1.Session(server.target) as session:
            session.run(v1.global_variables_initializer())
            lap("initialisation")
            session.run([train, loss], {batch: np.ones((BATCH, SHAPE[0]), np.float32)})
            lap("first step")
    print("times " + json.dumps({"elapsed": times, "processor": processor}), flush=True)


def graph(given: argparse.Namespace, batch: tf.Tensor) -> tuple[tf.Operation, tf.Tensor]:
    """The variables with a loss and Adam's updates."""
    with v1.device(v1.train.replica_device_setter(ps_tasks=len(given.ps), worker_device="/job:worker/task:0")):
        made = [
            v1.get_variable(
                f"v{number}",
                SHAPE,
                initializer=v1.random_normal_initializer(stddev=0.02 + number * 1e-6, seed=number),
                use_resource=True,
            )
            for number in range(given.variables)
        ]
        loss = tf.add_n([tf.reduce_mean((batch @ variable) ** 2) for variable in made])
        return v1.train.AdamOptimizer(1e-3).minimize(loss, var_list=made), loss


if __name__ == "__main__":
    main()
