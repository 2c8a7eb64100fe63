"""A user's Keras model as `dflow.keras.Model` needs it: checks, names of its variables, a copy with plain tables."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from dflow.keras.sharded_embedding import ShardedEmbedding
from dflow.tracing.errors import TrainingError, VariableError


def with_plain_tables(model: Any, tables: Mapping[str, Any]) -> Any:
    """Return a copy of a model with `keras.layers.Embedding` in place of its tables on tasks; see `Model.to_keras`."""
    try:
        copy = keras.models.clone_model(model, clone_function=_plain, recursive=True)
    except ValueError as error:
        raise VariableError(
            f"model {model.name!r} with dflow.keras.ShardedEmbedding layers: expected a functional or "
            f"sequential model to copy, got a {type(model).__name__}",
            "save its variables by dflow.save(path, model.state)",
        ) from error
    own = {variable.path: variable.value for variable in model.weights}
    for variable in copy.weights:
        table = tables.get(variable.path)
        variable.assign(own[variable.path] if table is None else table.read())
    return copy


def unfit_tables(found: Any, given: Any) -> TrainingError:
    """Return the error for an optimizer of tables and a model that do not fit together."""
    return TrainingError(
        f"tables: expected {'an optax transformation for' if found else 'None for a model without'} "
        f"dflow.keras.ShardedEmbedding layers, got {given!r}",
        "give tables=optax.adagrad(0.1)" if found else "leave it out",
    )


def _plain(layer: Any) -> Any:
    return layer.plain() if isinstance(layer, ShardedEmbedding) else type(layer).from_config(layer.get_config())


def names_of(given: Sequence[Any], model: str) -> dict[int, str]:
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


def check_model(model: Any) -> None:
    """Raise VariableError or TrainingError for a model, or an optimizer, that `dflow.keras.Model` does not support."""
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
