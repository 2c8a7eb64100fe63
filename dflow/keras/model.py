"""A Keras model over dflow's variables: its calls, its training as by Keras or by a step, and the way back.

Keras computes outputs, losses, metrics and updates by its stateless functions of values; dflow keeps the values.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from keras.src.trainers.data_adapters.array_slicing import train_validation_split

from dflow.calls.function import Function, jit
from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.cluster.cluster import cluster_with
from dflow.distributed.standalone import standalone
from dflow.distributed.training.strategy import Strategy, run_name
from dflow.keras.chief_words import ChiefWords
from dflow.keras.fit_data import FitBatches, fit_batches, plain
from dflow.keras.fitting import Fit, FitPlan, sees_all_parts, test_callbacks, without_loss
from dflow.keras.keras_model import check_model, names_of, unfit_tables, with_plain_tables
from dflow.keras.live_values import KeptWeights, LiveValues
from dflow.keras.metric_totals import ADDED, VECTOR, AddedStates, MetricStates, MetricTotals
from dflow.keras.sharded_embedding import ShardedEmbedding
from dflow.keras.transformation import state_of, transformation
from dflow.state_backends import LOCAL
from dflow.tracing.derivatives.autodiff import value_and_grad
from dflow.tracing.errors import TrainingError, VariableError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable, read
from dflow.tracing.state.variable_trees import variables
from dflow.trainer.evaluation import evaluate, is_on_tasks
from dflow.training.optimizer import Optimizer


class Model:
    """A Keras model whose variables are made here, as `dflow.Variable`s: within `cluster.parameter_servers()`, there.

    model     a built `keras.Model`; it may be compiled before, or by `compile` here
    strategy  the strategy whose loop `fit` runs, for instance `dflow.distributed.Sync(dflow.connect())`; the variables
              are made in its `variables()`. None: `fit` trains in this process alone
    tables    an optax transformation for the tables of its `ShardedEmbedding` layers
    raises    VariableError for a model that is not built, or has two variables of one path; TrainingError for an
              optimizer or a `train_step` that is not supported, and for `tables` that do not fit the model

    `trainable`      the trainable variables by Keras's paths, such as `sequential/dense/kernel`
    `tables`         the tables of its `ShardedEmbedding` layers, by their names
    `non_trainable`  statistics of batch norms and frozen layers by their paths; states of seeds by their numbers in
                     the model, since their paths depend on the models that the process made before
    `optimizers`     the `dflow.Optimizer` that runs the compiled one, and that of the tables

    The values are copied here. The Keras model keeps its first ones until `to_keras` is called.
    """

    @suggests_keywords
    def __init__(
        self, model: Any, *, strategy: Strategy | None = None, tables: optax.GradientTransformation | None = None
    ) -> None:
        check_model(model)
        self._model, self._strategy = model, strategy
        self._trained, self._others = model.trainable_variables, model.non_trainable_variables
        self._names = names_of([*self._trained, *self._others], model.name)
        found = {
            layer.table.name: layer.table for layer in model._flatten_layers() if isinstance(layer, ShardedEmbedding)
        }
        self.tables: dict[str, Any] = found
        self.optimizers: dict[str, Optimizer] = {}
        self._compiled = itertools.count()
        if tables is not None and not found:
            raise unfit_tables(found, tables)
        with self._scope():
            self.trainable: dict[str, Variable] = variables(self._by_name(self._trained))
            self.non_trainable: dict[str, Variable] = variables(self._by_name(self._others), trainable=False)
        if tables is not None:
            # Its step count too is where the tables are, also where the other variables are copies in each worker.
            with home(next(iter(found.values())).shards[0].home):
                self.optimizers["tables"] = Optimizer(tables, found, name=f"{model.name}/tables")
        if model.compiled:
            self._make_optimizer()
        self._live = LiveValues(model, self._pairs())
        self._outputs = jit(self._run, static_argnames="training")
        self._step = jit(self._train)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the Keras model, with the arguments of `keras.Model.compile`, and make its optimizer here."""
        self._model.compile(*args, **kwargs)
        check_model(self._model)
        self._make_optimizer()
        self._live, self._step = LiveValues(self._model, self._pairs()), jit(self._train)

    def _scope(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._strategy is None else self._strategy.variables()

    def _make_optimizer(self) -> None:
        model, number = self._model, next(self._compiled)
        if self.tables and "tables" not in self.optimizers:
            raise unfit_tables(self.tables, None)
        self._states: MetricStates | None = None
        self._totals: MetricTotals | None = None
        # A function for each model, since `evaluate` keeps the programs of a function.
        self._test_step = lambda x, y=None, sample_weight=None: self._test(x, y, sample_weight)
        if self._trained:
            if not model.optimizer.built:
                model.optimizer.build(self._trained)
            own = transformation(model.optimizer, self._trained)
            name = f"{model.name}/optimizer{f'_{number}' if number else ''}"
            with self._scope():
                self.optimizers["dense"] = Optimizer(own, self.trainable, name=name)

    def _pairs(self) -> list[tuple[Any, Variable]]:
        """Return the variables of the Keras model and of its optimizer, each with the variable here that is it."""
        pairs = [(variable, self.trainable[self._names[id(variable)]]) for variable in self._trained]
        pairs += [(variable, self.non_trainable[self._names[id(variable)]]) for variable in self._others]
        if "dense" in self.optimizers:
            own = jax.tree_util.tree_leaves(state_of(self._model.optimizer, self._trained, lambda slot: slot))
            pairs += zip(own, jax.tree_util.tree_leaves(self.optimizers["dense"].slots), strict=True)
        return pairs

    @property
    def state(self) -> dict[str, Any]:
        """All variables and optimizers, for `dflow.save`, `dflow.restore` and `dflow.CheckpointManager`."""
        return {
            "trainable": self.trainable,
            "tables": self.tables,
            "non_trainable": self.non_trainable,
            "optimizers": self.optimizers,
        }

    @property
    def train_step(self) -> Function[..., dict[str, Any]]:
        """A `dflow.jit` function of (x, y, sample_weight) that trains on a batch, for strategies and trainers.

        It returns the loss and the compiled metrics of this batch alone, as scalars. The optimizer's update is the
        compiled one. Raises TrainingError for a model that is not compiled.
        """
        self._check_compiled("train_step")
        return self._step

    @suggests_keywords
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> Any:
        """Train as `keras.Model.fit`, by the loop of the strategy; return Keras's `History`, on all workers.

        The arguments are those of Keras. Every worker gives the same. `x` may also be a table of Arrow, whose columns
        are inputs by name. Under `Sync`, `Hybrid` and `AllReduce` a batch is divided over the workers, and a step is
        Keras's on the whole of it; under `Async` a worker does a step on a whole batch, and an epoch has as many steps
        as Keras's. Metrics are those of all workers. Callbacks are called on worker 0, those of batches for its own
        steps. The values stay in the variables here; `to_keras` copies them.

        Raises TrainingError for a model that is not compiled, or is compiled with `run_eagerly`; for data without a
        known length and without `steps_per_epoch`; for a metric whose state is no sum; in a worker of a cluster
        without a strategy; for a batch that `AllReduce` cannot divide equally; and Keras's errors for the data.
        """
        self._check_compiled("fit")
        if validation_split and validation_data is None:
            given = map(plain, (x, y, sample_weight))
            (x, y, sample_weight), validation_data = train_validation_split((*given,), validation_split)
        strategy, run = self._loop(), run_name(self._loop().cluster, "fit")
        words = ChiefWords(strategy.cluster, run, is_together=strategy.ends_together)
        batches = fit_batches(
            *(x, y, sample_weight),
            batch_size=batch_size,
            steps=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            agree=words.first,
            # Keras draws one order more to build its metrics.
            skipped=self._states is None,
        )
        if (steps := steps_per_epoch) is None:
            steps = len(batches.limited(None, "steps_per_epoch"))
        totals, row = self._rows(batches.take(0), epochs)
        validation = None
        if validation_data is not None:
            own, size = keras.utils.unpack_x_y_sample_weight(validation_data), validation_batch_size or batch_size
            validation = fit_batches(*own, batch_size=size, steps=validation_steps)
            validation = validation.limited(validation_steps, "validation_steps")

        def validate(epoch: int) -> dict[str, float]:
            if validation is None or not self._model._should_eval(epoch, validation_freq):
                return {}
            return self._evaluated(validation, f"epoch {epoch} of {run}")

        plan = FitPlan(
            *(
                run,
                without_loss(strategy),
                self._fit_step,
                batches,
                steps,
                (initial_epoch, epochs),
                totals,
                row,
                validate,
            )
        )
        kept = None if self.tables else KeptWeights(self._weights(), self._totals_scope, f"{self._model.name}/kept")
        return Fit(plan, self._model, self._live, kept, callbacks, verbose).history()

    @suggests_keywords
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Evaluate as `keras.Model.evaluate`, with the present values; return the same metrics on all workers.

        The workers of a cluster, which all call it with the same data, share the batches. The arguments are those of
        Keras; callbacks are called at the begin and the end, on worker 0.

        Raises TrainingError as `fit`, and for callbacks of batches.
        """
        self._check_compiled("evaluate")
        cluster = self._loop().cluster
        batches = fit_batches(x, y, sample_weight, batch_size=batch_size, steps=steps).limited(steps, "steps")
        is_chief = ChiefWords(cluster, "", is_together=False).is_chief
        calls = test_callbacks(self._model, callbacks if is_chief else None, verbose if is_chief else 0, len(batches))
        with self._live.shown({}):
            calls.on_test_begin()
            logs = self._evaluated(batches, run_name(cluster, "evaluate"))
            calls.on_test_end(logs)
        return dict(sorted(logs.items())) if return_dict else self._model._flatten_metrics_in_order(logs)

    @suggests_keywords
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predict as `keras.Model.predict`, with the present values, in this process; the arguments are those of Keras.

        For a model with tables, whose rows are looked up where they are, raises TrainingError for callbacks.
        """
        if not self.tables:
            self._live.stale()
            self._live.pull()
            return self._model.predict(x, batch_size, verbose, steps, callbacks)
        if callbacks:
            raise TrainingError("predict of a model with tables: expected no callbacks, got some", "leave them out")
        batches = fit_batches(x, batch_size=batch_size, steps=steps).limited(steps, "steps")
        outputs = [self(batches.take(number)[0]) for number in range(len(batches))]
        return jax.tree_util.tree_map(lambda *parts: np.concatenate(parts), *outputs)

    def _check_compiled(self, what: str) -> None:
        if not self._model.compiled:
            raise TrainingError(
                f"{what}: expected a compiled model, got {self._model.name!r}, which is not",
                "call model.compile(optimizer, loss) before dflow.keras.Model(model)",
            )
        if self._model.run_eagerly:
            raise TrainingError(
                f"{what}: expected a model that is compiled, got {self._model.name!r} with run_eagerly=True",
                "leave run_eagerly out, and look at values by jax.debug.print",
            )

    def _loop(self) -> Strategy:
        """Return the strategy, or that of this process alone. Raises TrainingError for a worker without a strategy."""
        if self._strategy is not None:
            return self._strategy
        if cluster_with(()) is not None:
            raise TrainingError(
                f"model {self._model.name!r}: expected a strategy in a worker of a cluster, got None",
                "give dflow.keras.Model(model, strategy=dflow.distributed.Sync(cluster))",
            )
        self._strategy = Async(standalone(LOCAL.store))
        return self._strategy

    def _weights(self) -> list[Variable]:
        both = {**self.trainable, **self.non_trainable}
        return [both[self._names[id(variable)]] for variable in self._model.weights]

    def _totals_scope(self) -> AbstractContextManager[Any]:
        """Return the scope of variables that each worker's steps add to."""
        strategy = self._loop()
        return strategy.variables() if sees_all_parts(strategy) else strategy.cluster.parameter_servers(strategy._job)

    def _rows(self, batch: Any, epochs: int) -> tuple[MetricTotals, int]:
        """Return the sums of the metrics, with a row for each epoch from the second result on."""
        first = None if self._totals is None else self._totals.reserve(epochs)
        if first is None:
            name = run_name(self._loop().cluster, f"{self._model.name}/metrics")
            states = self._metric_states(batch)
            with self._totals_scope():
                totals = self._totals = MetricTotals(states, epochs, name)

            def train(row: Any, weight: Any, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
                return self._train_in_epoch(totals, row, weight, x, y, sample_weight)

            self._fit_step = jit(train)
            self._fit_step.trace_log().expect_short_batches()  # Keras uses the last batch of an epoch as it is
            first = totals.reserve(epochs)
        assert self._totals is not None
        assert first is not None
        return self._totals, first

    def _evaluated(self, batches: FitBatches, name: str) -> dict[str, float]:
        """Return the metrics over batches, which the workers of a cluster share under this name."""
        states, cluster = self._metric_states(batches.take(0)), self._loop().cluster
        is_shared = not cluster.is_standalone and is_on_tasks(self._test_step, batches)
        shared = (cluster, name) if is_shared else (None, None)
        found = evaluate(self._test_step, batches, cluster=shared[0], name=shared[1])
        return states.results(states.sums(found))

    def __call__(self, x: Any, *, training: bool = False) -> Any:
        """The outputs for a batch `x`, compiled. With `training`, the model also updates its statistics and seeds."""
        return self._outputs(x, training=training)

    def to_keras(self) -> Any:
        """Copy all values into the Keras model and its optimizer, and return it: to save, evaluate or train it there.

        A model with `ShardedEmbedding` layers gives a new one with `keras.layers.Embedding` in their place, not
        compiled, whose tables are in this process whole. Raises VariableError for such a model that is neither
        functional nor sequential.
        """
        self._live.stale()
        self._live.pull()
        return with_plain_tables(self._model, self.tables) if self.tables else self._model

    def _by_name(self, given: Sequence[Any]) -> dict[str, Any]:
        return {self._names[id(variable)]: variable.value for variable in given}

    def _values(self) -> tuple[list[Any], list[Any]]:
        if [*map(id, self._model.trainable_variables)] != [*map(id, self._trained)]:
            raise VariableError(
                f"model {self._model.name!r}: expected the {len(self._trained)} trainable variables that it had at "
                f"first, got {len(self._model.trainable_variables)}",
                "freeze layers before dflow.keras.Model(model)",
            )
        held = read((self.trainable, self.non_trainable))
        return [held[0][v.path] for v in self._trained], [held[1][self._names[id(v)]] for v in self._others]

    def _run(self, x: Any, training: bool) -> Any:
        values, others = self._values()
        given = {"training": training} if "training" in inspect.signature(self._model.call).parameters else {}
        outputs, changed = self._model.stateless_call(values, others, x, **given)
        if training:
            self._assign(others, changed)
        return outputs

    def _train(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        states = self._metric_states((x, y, sample_weight))
        value, outputs, metrics = self._update(states.start, None, x, y, sample_weight)
        with keras.StatelessScope(list(zip(self._model.metrics_variables, metrics, strict=True))):
            logs = self._model.compute_metrics(x, y, outputs, sample_weight)
        return {**logs, "loss": value}

    def _train_in_epoch(
        self, totals: MetricTotals, row: Any, weight: Any, x: Any, y: Any, sample_weight: Any
    ) -> dict[str, Any]:
        value, outputs, metrics = self._update(totals.states.start, weight, x, y, sample_weight)
        after = totals.states.updated(metrics, value, x, y, outputs, sample_weight)
        added = totals.states.added(after, weight)
        totals.add(row, added)
        return {"loss": value, **{f"{VECTOR}{dtype}": vector for dtype, vector in added.items()}}

    def _update(self, start: Sequence[Any], weight: Any, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
        """Train on a batch; return its loss, the outputs, and the states of the metrics after the loss.

        weight  weight of the batch in the mean of the gradients over the workers; None for that of the others
        """

        def loss() -> Any:
            values, others = self._values()
            optimizer = self._model.optimizer
            scaled, found = self._model.compute_loss_and_updates(
                values,
                others,
                start,
                x,
                y,
                sample_weight,
                training=True,
                optimizer_variables=[slot.value for slot in optimizer.variables],
            )
            return scaled if weight is None else scaled * weight, (others, *found)

        (_, found), gradients = value_and_grad(loss, [self.trainable, self.tables], has_aux=True)()
        others, value, outputs, changed, metrics = found
        self._assign(others, changed)
        for optimizer, gradient in zip(("dense", "tables"), gradients, strict=True):
            if optimizer in self.optimizers:
                self.optimizers[optimizer].apply(gradient)
        return value, outputs, metrics

    def _test(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Any]:
        """Return what a batch adds to the states of the metrics."""
        states = self._metric_states((x, y, sample_weight))
        values, others = self._values()
        _, found = self._model.compute_loss_and_updates(values, others, states.start, x, y, sample_weight)
        value, outputs, _, metrics = found
        return {ADDED: AddedStates(states.added(states.updated(metrics, value, x, y, outputs, sample_weight)))}

    def _assign(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        for variable, old, new in zip(self._others, before, after, strict=True):
            if new is not old:
                self.non_trainable[self._names[id(variable)]].assign(new)

    def _metric_states(self, batch: Any) -> MetricStates:
        """Return the states of the metrics. Keras makes these at the first batch, here of zeros and drawn outputs.

        Raises TrainingError for a metric whose state is no sum.
        """
        if self._states is None:
            types = jax.tree_util.tree_map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tuple(batch))
            outputs = self._outputs.eval_shape(types[0], training=True)
            drawn = np.random.default_rng(0)
            with jax.ensure_compile_time_eval():
                x, y, weight = jax.tree_util.tree_map(lambda one: jnp.zeros(one.shape, one.dtype), types)
                outputs = jax.tree_util.tree_map(lambda one: jnp.asarray(drawn.random(one.shape), one.dtype), outputs)
                self._states = MetricStates.of(self._model, x, y, outputs, weight)
        return self._states
