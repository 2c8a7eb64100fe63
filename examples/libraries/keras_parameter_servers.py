"""The script of TensorFlow's guide to `Model.fit` on parameter servers, with the lines of the strategy replaced.

    python examples/libraries/keras_parameter_servers.py
    dflow launch --ps 2 --workers 2 --restart on-failure examples/libraries/keras_parameter_servers.py

Every worker runs this script. Callbacks run on worker 0, which writes the checkpoints; the log has a line for each
epoch. The script is written for Keras 3 on JAX; on a cluster that is launched with `--snapshots`, a lost parameter task
is restored too.
"""

import argparse
import os
import tempfile

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import dflow
import dflow.keras

GLOBAL_BATCH_SIZE = 64


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--working-dir", help="where the callbacks write; by default a temporary folder")
    given = options.parse_args()

    # In place of ClusterCoordinator, resolver and partitioner. Async, Hybrid or AllReduce stand here as well.
    cluster = dflow.connect()
    strategy = dflow.distributed.Sync(cluster)

    drawn = np.random.default_rng(0)
    x = drawn.uniform(size=(1000, 10)).astype("float32")
    y = drawn.uniform(size=(1000, 1)).astype("float32")

    keras.utils.set_random_seed(0)
    model = keras.models.Sequential([keras.Input((10,)), keras.layers.Dense(10)])
    model = dflow.keras.Model(model, strategy=strategy)  # in place of `with strategy.scope():`
    model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

    working_dir = given.working_dir or tempfile.mkdtemp()
    callbacks = [
        keras.callbacks.CSVLogger(os.path.join(working_dir, "log.csv")),
        keras.callbacks.ModelCheckpoint(filepath=os.path.join(working_dir, "ckpt.keras")),
        keras.callbacks.BackupAndRestore(backup_dir=os.path.join(working_dir, "backup")),
    ]
    history = model.fit(
        x, y, batch_size=GLOBAL_BATCH_SIZE, epochs=5, steps_per_epoch=20, callbacks=callbacks, verbose=2
    )
    print("losses", *(f"{loss:.6f}" for loss in history.history["loss"]), flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
