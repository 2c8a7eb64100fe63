"""One version of a model: a loaded export, and a queue of requests for each of its functions that is served."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflow.distributed.cluster.cluster import Cluster
from dflow.exporting.export_format import read_manifest
from dflow.exporting.export_manifest import wide_arrays
from dflow.exporting.loaded_function import LoadedFunction
from dflow.exporting.loader import load, load_beside_job
from dflow.exporting.task_tables import forget, tables_of
from dflow.serving.request_batches import BatchObserver, RequestQueue, batch_sizes
from dflow.serving.row_check import ROWS, dependence_of_rows
from dflow.serving.rows.table_rows import FetchingFunction, TableRows
from dflow.serving.rows.task_rows import TableShard, TablesOfCluster, TaskRows, shards_of
from dflow.serving.rows.training_job import TrainingJob
from dflow.serving.signature_tensors import SignatureTensors
from dflow.serving.tensors import zeros
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import ConfigError, ExportError
from dflow.tracing.state.resources import Variable

#: Threads that call a function without batches: one prepares and answers while the other waits for the device.
_THREADS = 2
#: Longest time that a row of a training job is used, in s, if nothing else is asked for.
JOB_AGE_S = 10.0
#: Numbers of loads. A version whose files were replaced is loaded again beside its earlier self.
_loads = count(1)


def _prefix(settings: ServingSettings) -> str:
    """Return the start of the variables' names, which differ at tasks from those of other servers."""
    return f"{short_task_name(settings.tables.task)}/" if isinstance(settings.tables, Cluster) else ""


@dataclass(frozen=True)
class ServingSettings:
    """How models are served; see the options of `dflow serve`.

    max_batch    most rows of a batch; 0 computes each request alone
    max_delay_s  longest wait of a batch's first request for others
    max_queue    most requests of one function that wait, and most that the server holds
    max_bytes    most bytes of a request
    timeout_s    longest time until a request's computation begins
    learn        whether functions that write variables are served
    tables       cluster whose parameter tasks are to hold the tables, see `dflow.load`; or a training job, whose tables
                 are looked up in as they change; None to hold them here
    cache_rows   with `tables`, most rows of each table that are kept here
    max_age_s    with `tables`, longest time that such a row is used; by default `JOB_AGE_S` for those of a job, and
                 for ever for others

    raises  ConfigError for a number below its least value, and for `learn` with `tables`
    """

    max_batch: int = 0
    max_delay_s: float = 0.002
    max_queue: int = 256
    max_bytes: int = 64 << 20
    timeout_s: float = 30.0
    learn: bool = False
    tables: Cluster | TrainingJob | None = None
    cache_rows: int = 0
    max_age_s: float | None = None

    def __post_init__(self) -> None:
        least = {"max_batch": 0, "max_delay_s": 0, "max_queue": 1, "max_bytes": 1, "cache_rows": 0, "max_age_s": 0}
        for name, number in least.items():
            if not (getattr(self, name) is None or getattr(self, name) >= number):
                raise ConfigError(f"{name}: expected at least {number}, got {getattr(self, name)}", "give a larger one")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s: expected a time above 0, got {self.timeout_s}", "give one in seconds")
        if self.learn and self.tables is not None:
            raise ConfigError(
                "learn: expected tables in this process, got tables at tasks, which lose what calls write",
                "leave out one of --learn and --tables",
            )

    @property
    def age_s(self) -> float:
        """The longest time that a row is used."""
        usual = JOB_AGE_S if isinstance(self.tables, TrainingJob) else math.inf
        return usual if self.max_age_s is None else self.max_age_s


class ServedVersion:
    """A version of a model, ready for requests; the constructor compiles its programs.

    queues   by the name of each function that is served
    refused  for each other function, why not
    notes    what the user should know of it, as lines
    raises   ExportError if the export at `path` cannot be loaded, run, or no function of it can be served
    """

    def __init__(self, model: str, number: int, path: Path, settings: ServingSettings, observe: BatchObserver) -> None:
        # Precision is of a thread: models of both kinds are served beside each other.
        self._precision = partial(jax.enable_x64, True) if wide_arrays(read_manifest(path)) else nullcontext
        # A prefix for each load: other versions and models may have variables of these names, of other shapes.
        prefix = f"{_prefix(settings)}{model}/{number}/load_{next(_loads)}/"
        tables = settings.tables
        with self._precision():
            self.number = number
            if isinstance(tables, TrainingJob):
                self._loaded = load_beside_job(path, prefix)
            else:
                self._loaded = load(path, prefix=prefix, tables=tables)
        self._tables: TablesOfCluster | None = None
        #: The rows of the tables that are at tasks; None if there are none.
        self.rows: TableRows | None = None
        self.refused: dict[str, str] = {}
        self.notes: list[str] = []
        self._count_lock, self._updates, self._saved_updates = threading.Lock(), 0, 0
        #: Held by each call that writes variables.
        self._writing = threading.Lock()
        try:
            if tables is not None and any(one.lookups is not None for one in self._loaded._callers.values()):
                shards, reader, here = self._reader(path, tables)
                self.rows = TableRows(shards, reader, here, settings.cache_rows, settings.age_s)
            self._functions = {name: self._function(name) for name in self._loaded.signatures}
            self.queues = self._queues(model, path, settings, observe)
        except BaseException:
            self.free()
            raise

    def _queues(
        self, model: str, path: Path, settings: ServingSettings, observe: BatchObserver
    ) -> dict[str, RequestQueue]:
        """Compile the programs of the functions that can be served, and return the queues of these."""
        served = {
            name: tensors for name in self._loaded.signatures if (tensors := self._tensors(model, name, settings))
        }
        if not served:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
            raise ExportError(f"{path} has no function that can be served: {reasons}")
        most = {name: self._rows_of_batch(name, tensors, settings) for name, tensors in served.items()}
        for name, tensors in served.items():
            self._warm_up(name, tensors, most[name])
        return {
            name: RequestQueue(
                tensors,
                self._functions[name],
                most=most[name],
                delay_s=settings.max_delay_s,
                capacity=settings.max_queue,
                observe=observe,
                exclusive=self._writing if self._writes(name) else nullcontext(),
                on_update=self._count_update if self._writes(name) else None,
                threads=1 if most[name] or self._writes(name) else _THREADS,
            )
            for name, tensors in served.items()
        }

    @property
    def has_unsaved_updates(self) -> bool:
        """Whether a call has written variables since the last `save`."""
        return self._updates > self._saved_updates

    @property
    def is_lost(self) -> bool:
        """Whether a task has lost rows of the tables, so that the version must be loaded again."""
        return self._tables is not None and self._tables.is_lost

    def _reader(
        self, path: Path, tables: Cluster | TrainingJob
    ) -> tuple[list[TableShard], TaskRows, dict[str, Variable]]:
        """Return the tables of the functions, a reader of their rows, and the variables of the tables that are here."""
        variables, manifest = self._loaded.variables, self._loaded._manifest
        shards = shards_of(path, manifest, of_ids=isinstance(tables, TrainingJob))
        away = tables_of(manifest)
        here = {shard.name: variables[shard.name] for shard in shards if shard.name not in away}
        if isinstance(tables, TrainingJob):
            return shards, tables.rows([shard for shard in shards if shard.name in away]), here
        self._tables = TablesOfCluster(tables, variables)
        return shards, TaskRows(tables.transport, tables.task, self._tables), here

    def _function(self, name: str) -> Any:
        caller: LoadedFunction = self._loaded._callers[name]
        if self.rows is None or caller.lookups is None:
            return self._loaded[name]
        return FetchingFunction(caller, self.rows, of_ids=self._tables is None)

    def save(self, path: Path) -> None:
        """Write the functions with the present values of the variables; calls go on. Raises as `Loaded.save`."""
        counted = self._updates
        with self._precision():
            self._loaded.save(path)
        self._saved_updates = counted

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse later requests, and wait until those that wait are answered; return whether they were in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        closed = [queue.close(None if until is None else until - time.monotonic()) for queue in self.queues.values()]
        return all(closed)

    def free(self) -> None:
        """Free the values of the variables; no call is in progress, and none may follow."""
        if self.rows is not None:
            self.rows.tasks.close()
        forget(self._loaded.variables.values(), f"is gone: version {self.number} was unloaded")

    def _count_update(self) -> None:
        with self._count_lock:
            self._updates += 1

    def _writes(self, name: str) -> list[str]:
        return self._loaded.signature_of(name).writes

    def _tensors(self, model: str, name: str, settings: ServingSettings) -> SignatureTensors | None:
        """Return the tensors of a function, or None, with the reason in `refused`."""
        if self._writes(name) and not settings.learn:
            self.refused[name] = f"it writes {', '.join(self._writes(name))}, which needs dflow serve --learn"
            return None
        full = model if len(self._loaded.signatures) == 1 else f"{model}.{name}"
        try:
            return SignatureTensors(full, self._loaded.signature_of(name), self._precision)
        except ExportError as error:
            self.refused[name] = str(error).splitlines()[0]
            return None

    def _rows_of_batch(self, name: str, tensors: SignatureTensors, settings: ServingSettings) -> int:
        """Return the most rows of a batch, 0 for a function whose requests are computed one by one."""
        if settings.max_batch < 1:
            return 0
        reason = "its inputs and outputs have no leading dimension in common, with the others fixed"
        if self._writes(name):
            reason = "it writes variables"
        elif tensors.batch is not None:
            found = None
            if settings.max_batch > 1:
                with nullcontext() if self.rows is None else self.rows.held_still():
                    found = dependence_of_rows(tensors, self._functions[name], min(ROWS, settings.max_batch))
            if found is None:
                return settings.max_batch
            reason = found
        self.notes.append(f"{tensors.name} computes its requests one by one: {reason}")
        return 0

    def _warm_up(self, name: str, tensors: SignatureTensors, most: int) -> None:
        """Compile and run the function for each size of a batch, or once; the variables stay as they are."""
        with self._unchanged(self._writes(name)):
            for size in batch_sizes(most) if most else [1]:
                letters = {str(tensors.batch): size}
                if any(
                    not str(dim).isidentifier() for spec in tensors.inputs for dim in spec.dims if isinstance(dim, str)
                ):
                    continue  # no size is known to be one of a dimension such as 2*n
                tensors.call(self._functions[name], tensors.example(lambda dtype, shape: zeros(shape, dtype), letters))

    @contextmanager
    def _unchanged(self, names: list[str]) -> Iterator[None]:
        """Return the variables to their values at the end."""
        with self._precision():
            before = {name: jnp.copy(self._loaded.variables[name].read()) for name in names}
            try:
                yield
            finally:
                for name, value in before.items():
                    self._loaded.variables[name].assign(value)
