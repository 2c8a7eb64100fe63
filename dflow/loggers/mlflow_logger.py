"""Metrics as a run of MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.loggers.logger import Logger, plain_hyperparameters
from dflow.tracing.errors import TrainingError

#: Characters that MLflow refuses in a metric's name.
_ILLEGAL = re.compile(r"[^\w\-. /:]")


class MLflow(Logger):
    """Writes metrics to an MLflow tracking server or store.

    experiment       the name of an experiment, which is made if it is missing
    uri              of the server or store, such as `sqlite:///mlflow.db` or `http://host:5000`; by default as
                     MLFLOW_TRACKING_URI says
    run              name of the run; a program that is started again with the same one goes on in it. By default a new
                     run
    hyperparameters  numbers, texts and booleans by name, the run's parameters; other values are written as text
    cluster, all_workers, every  as for `TensorBoard`; with `all_workers` each worker has a run

    Raises ConfigError without the package mlflow, and at the start MlflowException for a store that it cannot use.
    """

    def __init__(
        self,
        experiment: str = "Default",
        *,
        uri: str | None = None,
        run: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        cluster: Cluster | None = None,
        all_workers: bool = False,
        every: int | None = None,
    ) -> None:
        super().__init__(f"{uri or 'MLFLOW_TRACKING_URI'}, {experiment}", cluster, all_workers, every)
        if '"' in (run or ""):
            raise TrainingError(
                f"{self._name}: run: expected a name without double quotes, got {run!r}", "give another name"
            )
        self._mlflow, self._entities = self._required("mlflow", "mlflow"), self._required("mlflow.entities", "mlflow")
        self._uri, self._experiment, self._given = uri, experiment, run
        self._client: Any = None
        self._run_id = ""
        self._hyperparameters = plain_hyperparameters(self._name, hyperparameters)

    def _open(self) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
        if self._run_id:  # this logger's run goes on
            self._client.update_run(self._run_id, status="RUNNING")
            return
        experiment_id = self._experiment_id()
        name = "-".join(filter(None, (self._given, self._task))) or None
        found = None
        if self._given is not None:
            found = self._client.search_runs([experiment_id], f'attributes.run_name = "{name}"', max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        params = [self._entities.Param(name, str(value)) for name, value in self._hyperparameters.items()]
        self._client.log_batch(self._run_id, params=params)

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        time_ms = int(1000 * time_s)
        metrics = [
            self._entities.Metric(_ILLEGAL.sub("_", name), value, time_ms, step) for name, value in numbers.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def _shut(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment))
            except self._mlflow.MlflowException:  # another worker has made it
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return str(found.experiment_id)
