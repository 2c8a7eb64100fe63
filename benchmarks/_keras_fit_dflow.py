"""A worker of `benchmarks.keras_fit`: `fit` of the ranking model; worker 0 prints the times of epochs as JSON."""

from __future__ import annotations

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from _keras_fit_model import compile_arguments, epoch_times, make_model, ratings

import dflow
import dflow.keras


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("batch", "steps", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    cluster = dflow.connect()
    model = dflow.keras.Model(make_model(keras), strategy=dflow.distributed.Async(cluster, lookahead=True))
    model.compile(**compile_arguments(keras))
    times = epoch_times(keras)
    x, y = ratings(given.batch * given.steps)
    model.fit(x, y, batch_size=given.batch, epochs=given.epochs, callbacks=[times], verbose=0)
    if cluster.index == 0:
        print("measured " + json.dumps(times.figures), flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
