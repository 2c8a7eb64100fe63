"""A Keras model over dflow's variables: its calls, its step of training, and the way back.

Keras computes outputs, losses, metrics and updates by its stateless functions of values; dflow keeps the values.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import optax

from dflow.calls.function import Function, jit
from dflow.keras.sharded_embedding import ShardedEmbedding
from dflow.keras.transformation import state_of, transformation
from dflow.tracing.derivatives.autodiff import value_and_grad
from dflow.tracing.errors import TrainingError, VariableError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.state.context import home
from dflow.tracing.state.resources import Variable, read
from dflow.tracing.state.variable_trees import variables
from dflow.training.optimizer import Optimizer


class Model:
    """A Keras model whose variables are made here, as `dflow.Variable`s: within `cluster.parameter_servers()`, there.

    model   a built `keras.Model`, with `compile(optimizer, loss)` for `train_step`
    tables  an optax transformation for the tables of its `ShardedEmbedding` layers
    raises  VariableError for a model that is not built, or has two variables of one path; TrainingError for an
            optimizer or a `train_step` that is not supported, and for `tables` that do not fit the model

    `trainable`      the trainable variables by Keras's paths, such as `sequential/dense/kernel`
    `tables`         the tables of its `ShardedEmbedding` layers, by their names
    `non_trainable`  statistics of batch norms and frozen layers by their paths; states of seeds by their numbers in
                     the model, since their paths depend on the models that the process made before
    `optimizers`     the `dflow.Optimizer` that runs the compiled one, and that of the tables

    The values are copied here. The Keras model keeps its first ones until `to_keras` is called.
    """

    @suggests_keywords
    def __init__(self, model: Any, *, tables: optax.GradientTransformation | None = None) -> None:
        _check(model)
        self._model = model
        self._trained, self._others = model.trainable_variables, model.non_trainable_variables
        self._names = _names([*self._trained, *self._others], model.name)
        found = {
            layer.table.name: layer.table for layer in model._flatten_layers() if isinstance(layer, ShardedEmbedding)
        }
        self.tables: dict[str, Any] = found
        self.trainable: dict[str, Variable] = variables(self._by_name(self._trained))
        self.non_trainable: dict[str, Variable] = variables(self._by_name(self._others), trainable=False)
        self.optimizers: dict[str, Optimizer] = {}
        if (found and tables is None and model.compiled) or (tables is not None and not found):
            raise TrainingError(
                f"tables: expected {'an optax transformation for' if found else 'None for a model without'} "
                f"dflow.keras.ShardedEmbedding layers, got {tables!r}",
                "give tables=optax.adagrad(0.1)" if found else "leave it out",
            )
        if model.compiled and self._trained:
            if not model.optimizer.built:
                model.optimizer.build(self._trained)
            own = transformation(model.optimizer, self._trained)
            self.optimizers["dense"] = Optimizer(own, self.trainable, name=f"{model.name}/optimizer")
        if tables is not None and found:
            # Its step count too is where the tables are, also where the other variables are copies in each worker.
            with home(next(iter(found.values())).shards[0].home):
                self.optimizers["tables"] = Optimizer(tables, found, name=f"{model.name}/tables")
        self._start: list[Any] | None = None
        self._outputs = jit(self._run, static_argnames="training")
        self._step = jit(self._train)

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
        if not self._model.compiled:
            raise TrainingError(
                f"train_step: expected a compiled model, got {self._model.name!r}, which is not",
                "call model.compile(optimizer, loss) before dflow.keras.Model(model)",
            )
        return self._step

    def __call__(self, x: Any, *, training: bool = False) -> Any:
        """The outputs for a batch `x`, compiled. With `training`, the model also updates its statistics and seeds."""
        return self._outputs(x, training=training)

    def to_keras(self) -> Any:
        """Copy all values into the Keras model and its optimizer, and return it: to save, evaluate or train it there.

        A model with `ShardedEmbedding` layers gives a new one with `keras.layers.Embedding` in their place, not
        compiled, whose tables are in this process whole. Raises VariableError for such a model that is neither
        functional nor sequential.
        """
        for given, held in ((self._trained, self.trainable), (self._others, self.non_trainable)):
            for variable in given:
                variable.assign(held[self._names[id(variable)]].read())
        if "dense" in self.optimizers:
            slots = jax.tree_util.tree_leaves(read(self.optimizers["dense"].slots))
            own = jax.tree_util.tree_leaves(state_of(self._model.optimizer, self._trained, lambda slot: slot))
            for slot, value in zip(own, slots, strict=True):
                slot.assign(value)
        return self._with_plain_tables() if self.tables else self._model

    def _with_plain_tables(self) -> Any:
        try:
            copy = keras.models.clone_model(self._model, clone_function=_plain, recursive=True)
        except ValueError as error:
            raise VariableError(
                f"model {self._model.name!r} with dflow.keras.ShardedEmbedding layers: expected a functional or "
                f"sequential model to copy, got a {type(self._model).__name__}",
                "save its variables by dflow.save(path, model.state)",
            ) from error
        own = {variable.path: variable.value for variable in self._model.weights}
        for variable in copy.weights:
            table = self.tables.get(variable.path)
            variable.assign(own[variable.path] if table is None else table.read())
        return copy

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
        start = self._metrics_start(x, y, sample_weight)

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
            return scaled, (others, *found)

        (_, found), gradients = value_and_grad(loss, [self.trainable, self.tables], has_aux=True)()
        others, value, outputs, changed, metrics = found
        self._assign(others, changed)
        for optimizer, gradient in zip(("dense", "tables"), gradients, strict=True):
            if optimizer in self.optimizers:
                self.optimizers[optimizer].apply(gradient)
        with keras.StatelessScope(list(zip(self._model.metrics_variables, metrics, strict=True))):
            logs = self._model.compute_metrics(x, y, outputs, sample_weight)
        return {**logs, "loss": value}

    def _assign(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        for variable, old, new in zip(self._others, before, after, strict=True):
            if new is not old:
                self.non_trainable[self._names[id(variable)]].assign(new)

    def _metrics_start(self, *batch: Any) -> list[Any]:
        """The metrics' own variables before a batch. Keras makes these at the first batch, here of zeros."""
        if self._start is None:
            types = jax.tree_util.tree_map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), batch)
            outputs = self._outputs.eval_shape(types[0], training=True)
            with jax.ensure_compile_time_eval():
                x, y, weight, outputs = jax.tree_util.tree_map(
                    lambda one: jnp.zeros(one.shape, one.dtype), (*types, outputs)
                )
                self._model.compute_loss(x, y, outputs, weight)
                self._model.compute_metrics(x, y, outputs, weight)
                self._model.reset_metrics()
                self._start = [variable.value for variable in self._model.metrics_variables]
        return self._start


def _plain(layer: Any) -> Any:
    return layer.plain() if isinstance(layer, ShardedEmbedding) else type(layer).from_config(layer.get_config())


def _names(given: Sequence[Any], model: str) -> dict[int, str]:
    """Return a name for each of a model's variables, by its id: the same in each process that makes the model."""
    names: dict[int, str] = {}
    seeds = itertools.count()
    for variable in given:
        is_seed = variable.path.endswith("/seed_generator_state")
        name = f"{model}/seeds/{next(seeds)}" if is_seed else variable.path
        if name in names.values():
            raise VariableError(
                f"variables of a Keras model: expected each path once, got two of {name!r}",
                "give the layers names of their own: name=",
            )
        names[id(variable)] = name
    return names


def _check(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise VariableError(
            f"dflow.keras.Model: expected a keras.Model, got a {type(model).__name__}",
            "make variables of other parameters by dflow.variables",
        )
    if not model.built:
        raise VariableError(
            f"model {model.name!r}: expected a built model, got one without variables",
            "give it an input shape: keras.Input(shape) as the first layer, or model.build((None, *shape))",
        )
    if type(model).train_step is not keras.Model.train_step:
        raise TrainingError(
            f"model {model.name!r}: expected the train_step of keras.Model, got one of {type(model).__name__}",
            "write the step as a dflow.jit function of dflow.keras.Model(keras.Model(inputs, outputs))",
        )
    if model.compiled and isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise TrainingError(
            f"model {model.name!r}: expected an optimizer without a loss scale, got LossScaleOptimizer",
            "use the policy 'mixed_bfloat16', whose gradients need none, or compile with auto_scale_loss=False",
        )
