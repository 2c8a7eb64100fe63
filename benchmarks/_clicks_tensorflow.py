"""A task of `benchmarks.peers_training` by TensorFlow, in an environment with it: the click-through model of `_clicks`.

Graph mode and gRPC. The table is divided over the ps tasks; only rows and their gradients travel, each row once, and
Adagrad's sparse update runs where the rows are. The workers do not wait for each other. `make_callable` costs less
than `Session.run`, and graph mode less than `ParameterServerStrategy`.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

from benchmarks import _clicks

v1 = tf.compat.v1


def main() -> None:
    began = time.perf_counter()
    options = _clicks.parser()
    options.add_argument("--job", choices=("ps", "worker"), required=True)
    options.add_argument("--index", type=int, required=True)
    options.add_argument("--ps", nargs="+", required=True, metavar="ADDRESS")
    options.add_argument("--workers", nargs="+", required=True, metavar="ADDRESS")
    given = options.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers})
    config = v1.ConfigProto(intra_op_parallelism_threads=1)
    server = v1.train.Server(spec, job_name=given.job, task_index=given.index, config=config)
    if given.job == "ps":
        print("up", flush=True)
        server.join()
    batches = _clicks.batches(given, given.index, len(given.workers))
    with tf.Graph().as_default():
        inputs = [v1.placeholder(array.dtype, array.shape) for array in batches[0]]
        initial: dict[tf.Tensor, np.ndarray] = {}
        step = graph(given, inputs, initial)
        scaffold = v1.train.Scaffold(init_feed_dict=initial)
        chief = v1.train.ChiefSessionCreator if given.index == 0 else v1.train.WorkerSessionCreator
        with v1.train.MonitoredSession(chief(scaffold, server.target, config)) as monitored:
            run = monitored._tf_sess().make_callable(step, feed_list=inputs)
            _clicks.train((run(*batch)[1] for batch in batches), began)


def graph(
    given: argparse.Namespace, inputs: list[tf.Tensor], initial: dict[tf.Tensor, np.ndarray]
) -> list[tf.Tensor | tf.Operation]:
    """Return the update and the loss before it; put the initial values into `initial`, by placeholder."""
    ids, numbers, clicks = inputs

    def variable(name: str, value: np.ndarray) -> tf.Variable:
        placeholder = v1.placeholder(tf.float32, value.shape)
        initial[placeholder] = value
        return v1.get_variable(name, initializer=placeholder, use_resource=True)

    worker = f"/job:worker/task:{given.index}"
    with v1.device(v1.train.replica_device_setter(ps_tasks=len(given.ps), worker_device=worker)):
        whole = _clicks.initial_table(given.rows)
        # `mod` is the default of lookups, and costs the least: row r is in shard r % shards.
        table = [variable(f"table{shard}", whole[shard :: len(given.ps)]) for shard in range(len(given.ps))]
        layers = [
            (variable(f"kernel{layer}", kernel), variable(f"bias{layer}", bias))
            for layer, (kernel, bias) in enumerate(_clicks.initial_layers())
        ]
        flat = tf.reshape(ids, [-1])
        once, places = tf.unique(flat)
        rows = tf.gather(tf.nn.embedding_lookup(table, once), places)
        x = tf.concat([tf.reshape(rows, [ids.shape[0], -1]), numbers], 1)
        *hidden, (last, shift) = layers
        for kernel, bias in hidden:
            x = tf.nn.relu(x @ kernel + bias)
        odds = (x @ last + shift)[:, 0]
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=clicks, logits=odds))
        optimizer = v1.train.AdagradOptimizer(_clicks.LEARNING_RATE, _clicks.ACCUMULATOR)
        update = optimizer.minimize(loss, v1.train.get_or_create_global_step())
    return [update, loss]


if __name__ == "__main__":
    main()
