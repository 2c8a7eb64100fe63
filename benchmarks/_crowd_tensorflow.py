"""Tasks of `benchmarks.many_workers` by TensorFlow: a ps task, or many workers in one process, as in `_crowd`.

Each worker has a server, a session and a thread. Graph mode, gRPC.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

from benchmarks._train import train

VARIABLES, SHAPE = 4, (64, 64)
v1 = tf.compat.v1


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=0, help="steps of each worker in one step of the crowd")
    parser.add_argument("--indices", type=int, nargs="+", default=[])
    parser.add_argument("--job", choices=("ps", "worker"), required=True)
    parser.add_argument("--index", type=int)
    parser.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = parser.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    if given.job == "ps":
        server = v1.train.Server(spec, job_name="ps", task_index=given.index)
        print("up", flush=True)
        server.join()
    servers = [v1.train.Server(spec, job_name="worker", task_index=index) for index in given.indices]
    steps = [make_step(server, index, len(given.ps)) for server, index in zip(servers, given.indices, strict=True)]

    def work(step: Callable[[], float]) -> float:
        return [step() for _ in range(given.count)][-1]

    with ThreadPoolExecutor(len(steps)) as pool:
        train(lambda: max(pool.map(work, steps)), began)


def make_step(server: v1.train.Server, index: int, ps: int) -> Callable[[], float]:
    """Return a step of gradient descent on all variables."""
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, (1, SHAPE[0]))
        with v1.device(v1.train.replica_device_setter(ps_tasks=ps, worker_device=f"/job:worker/task:{index}")):
            variables = [
                v1.get_variable(f"v{number}", SHAPE, initializer=v1.ones_initializer(), use_resource=True)
                for number in range(VARIABLES)
            ]
            loss = tf.add_n([tf.reduce_mean((x @ variable) ** 2) for variable in variables])
            update = v1.train.GradientDescentOptimizer(1e-6).minimize(loss, var_list=variables)
        start = v1.global_variables_initializer()
    # A session waits for every task that it may use.
    config = v1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"])
    session = v1.Session(server.target, graph, config)
    session.run(start)
    feed = {x: np.ones((1, SHAPE[0]), np.float32)}
    return lambda: float(session.run([loss, update], feed)[0])


if __name__ == "__main__":
    main()
