"""Metrics as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflow.distributed.cluster.cluster import Cluster
from dflow.loggers.logger import Logger, plain_hyperparameters, renamed


class WandB(Logger):
    """Writes metrics to Weights & Biases, with `step` as the axis of each curve; a metric of that name is `step_`.

    project          the name of a project
    run              name and id of the run; a program that is started again with the same one goes on in it. By default
                     a new run
    hyperparameters  numbers, texts and booleans by name, the run's `config`; other values are written as text
    cluster, all_workers, every  as for `TensorBoard`; with `all_workers` each worker has a run, in the group `run`
    init             further keywords for `wandb.init`, such as `mode="offline"`, `dir="logs"` or `tags=["try"]`

    Raises ConfigError without the package wandb, and at the start what `wandb.init` raises.
    """

    def __init__(
        self,
        project: str,
        *,
        run: str | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        cluster: Cluster | None = None,
        all_workers: bool = False,
        every: int | None = None,
        **init: Any,
    ) -> None:
        super().__init__(project if run is None else f"{project}/{run}", cluster, all_workers, every)
        self._wandb = self._required("wandb", "wandb")
        self._init = {"project": project, "reinit": "create_new", **init}
        self._given = run
        self._run: Any = None
        self._hyperparameters = plain_hyperparameters(self._name, hyperparameters)

    def _open(self) -> None:
        names: dict[str, Any] = {}
        if self._given is not None:
            name = "-".join(filter(None, (self._given, self._task)))
            names = {"id": name, "name": name, "resume": "allow"} | ({"group": self._given} if self._task else {})
        self._run = self._wandb.init(config=self._hyperparameters, **names, **self._init)
        # Its own count of steps cannot go back, as it must after a return to a checkpoint.
        self._run.define_metric("*", step_metric="step")

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **renamed(numbers)})

    def _shut(self, failed: bool) -> None:
        run, self._run = self._run, None
        run.finish(exit_code=int(failed))
