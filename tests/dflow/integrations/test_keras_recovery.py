"""`fit` on processes that are killed in the middle of epochs: a worker, worker 0 and a parameter task."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.processes import Spawned, children

keras = pytest.importorskip("keras")

pytestmark = pytest.mark.once

SCRIPT = """
import json, os, pathlib, signal, sys

os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np

drawn = np.random.default_rng(0)
x, y = drawn.normal(size=(205, 4)).astype("f4"), drawn.integers(2, size=(205, 1)).astype("f4")
epoch = [0]

def once(name):
    try:
        pathlib.Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

class Faults(keras.utils.PyDataset):
    index = None

    def __len__(self):
        return 21

    def on_epoch_begin(self):
        epoch[0] += 1

    def __getitem__(self, item):
        if item == 10 and (self.index, epoch[0]) in ((1, 2), (0, 4)) and once(f"killed {self.index}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 12 and (self.index, epoch[0]) == (0, 3) and once("asked"):
            print("kill a parameter task", flush=True)
        return x[item * 10 : item * 10 + 10], y[item * 10 : item * 10 + 10]

class Examples(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_pred.shape[0])

def train(model, **given):
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=[Examples(name="examples"), "AUC"])
    stop = keras.callbacks.EarlyStopping("val_loss", patience=9, restore_best_weights=True)
    return model.fit(
        Faults(), epochs=6, shuffle=False, validation_data=(x, y), verbose=0, callbacks=[stop], **given
    ).history

def made():
    keras.utils.set_random_seed(0)
    inside = [keras.layers.Dense(8, "relu", name="hidden"), keras.layers.Dense(1, "sigmoid", name="out")]
    return keras.Sequential([keras.Input((4,)), *inside], name="model")

if __name__ == "__main__":
    import dflow, dflow.keras

    cluster = dflow.connect()
    Faults.index = cluster.index
    history = train(dflow.keras.Model(made(), strategy=getattr(dflow.distributed, sys.argv[1])(cluster)))
    print("history", json.dumps(history), flush=True)
    cluster.close()
"""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["Sync", "Async"])
def test_kills_in_the_middle_of_epochs_change_no_count(kind: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    again = ("--restart", "on-failure", "--restart", "ps=on-failure")
    snapshots = ("--snapshots", "snapshots", "--snapshot-every", "1")
    words = ("-m", "dflow", "launch", "--ps", "2", "--workers", "2", *again, *snapshots, "train.py", kind)
    with Spawned(*words, cwd=tmp_path) as launched:
        launched.read_until("kill a parameter task")
        started = children(launched.process.pid)
        [task] = [pid for pid, words in started.items() if {"task", "--index", "1"} <= {*words}]
        os.kill(task, signal.SIGKILL)
        status, output = launched.finish()
    assert status == 0, output
    assert {"killed 0", "killed 1", "asked"} <= {path.name for path in tmp_path.iterdir()}
    histories = [json.loads(line.partition("history ")[2]) for line in output.splitlines() if "history {" in line]
    assert len(histories) == 2
    for history in histories:
        assert history["examples"] == [205] * 6
        assert history == histories[0]
    if kind == "Sync":
        script: dict[str, object] = {"__name__": "script"}
        exec(SCRIPT, script)
        want = script["train"](script["made"]())  # type: ignore[operator]
        for name, values in want.items():
            np.testing.assert_allclose(histories[0][name], values, rtol=1e-6, err_msg=name)
