"""A task of `benchmarks.many_variables` by TensorFlow, in an environment with it and without JAX.

Graph mode, variables on ps tasks, gRPC; Adam's updates are the kernels of its own optimizer, on the ps tasks.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf

from benchmarks._models import LEARNING_RATE, dense
from benchmarks._train import train

v1 = tf.compat.v1


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", type=int)
    parser.add_argument("--job", choices=("ps", "worker"), required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = parser.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    server = v1.train.Server(spec, job_name=given.job, task_index=given.index)
    if given.job == "ps":
        print("up", flush=True)
        server.join()
    model = dense(given.layers)
    with tf.Graph().as_default(), v1.Session(server.target) as session:
        values = {name: v1.placeholder(tf.float32, value.shape) for name, value in model.initial.items()}
        batch = tuple(v1.placeholder(tf.float32, value.shape) for value in model.batch)
        step = graph(given, values, batch)
        feed = {values[name]: value for name, value in model.initial.items()}
        session.run(v1.global_variables_initializer(), feed)
        feed = dict(zip(batch, model.batch, strict=True))
        train(lambda: float(session.run(step, feed)[1]), began)


def graph(given: argparse.Namespace, values: dict[str, tf.Tensor], batch: tuple[tf.Tensor, ...]) -> list[tf.Tensor]:
    """Return Adam's updates and the loss before them."""
    x, y = batch
    with v1.device(v1.train.replica_device_setter(ps_tasks=len(given.ps), worker_device="/job:worker/task:0")):
        variables = [v1.get_variable(name, initializer=value, use_resource=True) for name, value in values.items()]
        for variable in variables:
            x = x + tf.nn.relu(x @ variable)
        loss = tf.reduce_mean((x - y) ** 2)
        return [v1.train.AdamOptimizer(LEARNING_RATE).minimize(loss, var_list=variables), loss]


if __name__ == "__main__":
    main()
