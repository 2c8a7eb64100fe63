"""A task that trains the dense model of `_models` by TensorFlow, in an environment with it and without JAX.

Graph mode, variables on ps tasks, gRPC; TensorFlow's kernels for Adam update them there. With
`--synchronous`, `SyncReplicasOptimizer` averages the gradients of all workers in accumulators on the ps tasks.
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
    for name in ("layers", "width"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="computing threads of each task")
    parser.add_argument("--synchronous", action="store_true")
    parser.add_argument("--job", choices=("ps", "worker"), required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = parser.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    config = v1.ConfigProto(intra_op_parallelism_threads=given.threads)
    server = v1.train.Server(spec, job_name=given.job, task_index=given.index, config=config)
    if given.job == "ps":
        print("up", flush=True)
        server.join()
    model = dense(given.layers, given.width)
    with tf.Graph().as_default():
        values = {name: v1.placeholder(tf.float32, value.shape) for name, value in model.initial.items()}
        batch = tuple(v1.placeholder(tf.float32, value.shape) for value in model.batch)
        step, hooks = graph(given, values, batch)
        scaffold = v1.train.Scaffold(init_feed_dict={values[name]: value for name, value in model.initial.items()})
        feed = dict(zip(batch, model.batch, strict=True))
        chief = v1.train.ChiefSessionCreator if given.index == 0 else v1.train.WorkerSessionCreator
        with v1.train.MonitoredSession(chief(scaffold, server.target, config), hooks) as session:
            train(lambda: float(session.run(step, feed)[1]), began)


def graph(
    given: argparse.Namespace, values: dict[str, tf.Tensor], batch: tuple[tf.Tensor, ...]
) -> tuple[list[tf.Tensor], list[v1.train.SessionRunHook]]:
    """Return Adam's updates and the loss before them, and the hooks that they need."""
    x, y = batch
    worker = f"/job:worker/task:{given.index}"
    optimizer, hooks = v1.train.AdamOptimizer(LEARNING_RATE), []
    with v1.device(v1.train.replica_device_setter(ps_tasks=len(given.ps), worker_device=worker)):
        variables = [v1.get_variable(name, initializer=value, use_resource=True) for name, value in values.items()]
        for variable in variables:
            x = x + tf.nn.relu(x @ variable)
        loss = tf.reduce_mean((x - y) ** 2)
        if given.synchronous:
            count = len(given.workers)
            optimizer = v1.train.SyncReplicasOptimizer(optimizer, count, count)
            hooks = [optimizer.make_session_run_hook(given.index == 0, num_tokens=0)]
        update = optimizer.minimize(loss, v1.train.get_or_create_global_step(), variables)
    # `make_session_run_hook` needs the graph of `minimize` only when the session starts.
    return [update, loss], hooks


if __name__ == "__main__":
    main()
