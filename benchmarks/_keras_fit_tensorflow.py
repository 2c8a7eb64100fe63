"""`benchmarks.keras_fit` by TensorFlow's ParameterServerStrategy, in an environment with TensorFlow and tf_keras.

The coordinator, which calls `fit`, prints the times of epochs as JSON; the other tasks run TensorFlow's server.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TF_USE_LEGACY_KERAS"] = "1"

import tensorflow as tf
import tf_keras as keras
from _keras_fit_model import compile_arguments, epoch_times, make_model, ratings


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", choices=("ps", "worker", "chief"), required=True)
    parser.add_argument("--index", type=int, default=0)
    for name in ("batch", "steps", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("ps", "workers"):
        parser.add_argument(f"--{name}", nargs="+", required=True, metavar="ADDRESS")
    parser.add_argument("--chief", required=True)
    given = parser.parse_args()
    spec = tf.train.ClusterSpec({"ps": given.ps, "worker": given.workers, "chief": [given.chief]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=given.job, task_id=given.index, rpc_layer="grpc"
    )
    if given.job != "chief":
        server = tf.distribute.Server(spec, job_name=given.job, task_index=given.index, protocol="grpc", start=True)
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = make_model(keras)
        model.compile(**compile_arguments(keras))

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(ratings(given.batch * given.steps))
        return data.shuffle(given.batch * given.steps).repeat().batch(given.batch).prefetch(2)

    times = epoch_times(keras)
    creator = keras.utils.experimental.DatasetCreator(dataset)
    model.fit(creator, steps_per_epoch=given.steps, epochs=given.epochs, callbacks=[times], verbose=0)
    print("measured " + json.dumps(times.figures), flush=True)
    os._exit(0)  # the servers have no end


if __name__ == "__main__":
    main()
