"""`dflow.loggers.WandB` and `MLflow` with the real libraries, offline."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dflow
from dflow.loggers import MLflow, WandB
from tests.dflow.loggers.small_runs import trained, warned, write
from tests.distributed.waiting import until

pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local store of MLflow."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return (tmp_path / "mlruns").as_uri()


def history(store: str, run_id: str, name: str) -> list[tuple[int, float]]:
    import mlflow

    found = mlflow.MlflowClient(store).get_metric_history(run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


def runs(store: str, experiment: str) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient(store)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id]))


def test_a_trainer_with_mlflow(store: str) -> None:
    with MLflow("digits", uri=store, every=1, hyperparameters={"rate": 0.1, "sizes": [1, 2]}) as log:
        trained([log], steps=4)
    (run,) = runs(store, "digits")
    assert run.info.status == "FINISHED"
    assert run.data.params == {"rate": "0.1", "sizes": "[1, 2]"}
    assert [step for step, _ in history(store, run.info.run_id, "loss")] == [1, 2, 3, 4]
    assert [step for step, _ in history(store, run.info.run_id, "evaluation/loss")] == [2, 4]


def test_a_run_of_mlflow_goes_on_by_its_name_and_fails_with_its_program(store: str) -> None:
    with MLflow("digits", uri=store, run="it's one") as log:
        log.log(0, {"loss": math.nan, "top-1 (%)": 2})
    with suppress(ZeroDivisionError), MLflow("digits", uri=store, run="it's one") as log:
        log.log(1, {"loss": math.inf})
        raise ZeroDivisionError
    (run,) = runs(store, "digits")
    assert run.info.status == "FAILED"
    (_, first), (step, second) = history(store, run.info.run_id, "loss")
    assert (math.isnan(first), step, second) == (True, 1, math.inf)
    assert history(store, run.info.run_id, "top-1 ___") == [(0, 2)]
    MLflow("digits", uri=store).log(0, 1)
    assert len(runs(store, "digits")) == 2


def test_a_store_that_fails_is_a_warning(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    with MLflow("digits", uri=store) as log:
        log.log(0, 1)
        log.flush()
        with monkeypatch.context() as broken:
            broken.delattr(mlflow.MlflowClient, "log_batch")
            text = r"MLflow: file.*, digits: expected to write, got AttributeError"
            warned(text, partial(write, log, (1, 1)))
        warned("writes again; 1 entries are lost", partial(write, log, (2, 1)))
        with monkeypatch.context() as broken:
            broken.delattr(mlflow.MlflowClient, "log_batch")
            warned("expected to write", partial(write, log, (3, 1)))
    (run,) = runs(store, "digits")
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(store, run.info.run_id, "loss")] == [0, 2]


def test_a_trainer_with_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    with WandB(
        "digits", run="one", every=1, hyperparameters={"rate": 0.1}, mode="offline", dir=tmp_path, settings=settings
    ) as log:
        trained([log], steps=4)
        log.log(2, {"loss": math.nan})
    (file,) = tmp_path.glob("wandb/offline-run-*-one/run-one.wandb")
    until(lambda: any(record.HasField("exit") for record in records(file.read_bytes())))  # its service writes it
    found = [*records(file.read_bytes())]
    (run,) = (record.run for record in found if record.HasField("run"))
    assert (run.project, run.run_id, run.display_name) == ("digits", "one", "one")
    assert {one.key: json.loads(one.value_json) for one in run.config.update}["rate"] == 0.1
    rows = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 2]
    assert [row["step"] for row in rows if "evaluation/loss" in row] == [2, 4]
    assert rows[0]["loss"] == 1  # of weights that are zero
    assert math.isnan(float(rows[-1]["loss"]))
    (axis,) = (record.metric for record in found if record.HasField("metric") and record.metric.glob_name == "*")
    assert axis.step_metric == "step"
    assert next(record.exit.exit_code for record in found if record.HasField("exit")) == 0


def records(written: bytes) -> Iterator[Any]:
    """The records of a file of Weights & Biases: 7 bytes, then blocks of 32 KiB of fragments, as in LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, record = 7, b""
    while at + 7 <= len(written):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", written, at + 4)
        record += written[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last fragment
            yield Record.FromString(record)
            record = b""


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for logger, module in ((WandB, "wandb"), (MLflow, "mlflow")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(dflow.ConfigError, match=rf"(?s)expected the package {module}.*test_.*pip install {module}"):
            logger("project")
