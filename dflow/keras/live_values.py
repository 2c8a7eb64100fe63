"""The values of a Keras model as its callbacks see and change them, while dflow's variables have the live ones.

Keras's callbacks get the Keras model. When one of them looks at it, the values are copied there; what a callback has
changed (a learning rate, the best weights) is then copied back to the variables of dflow.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.calls.function import jit
from dflow.tracing.errors import TrainingError, VariableError
from dflow.tracing.state.resources import Variable, read


class LiveValues:
    """Copies values between the variables of a Keras model and those of dflow.

    model  the Keras model
    pairs  each Keras variable with its variable of dflow
    """

    def __init__(self, model: Any, pairs: Sequence[tuple[Any, Variable]]) -> None:
        self._model, self._pairs = model, pairs
        self._is_fresh = False
        #: The values that each Keras variable had after the last copy: JAX's arrays, which never change.
        self._seen = [given.value for given, _ in pairs]
        #: Whether variables are on tasks, so that one step reads all of them.
        self._are_on_tasks = bool(pairs) and all(variable.home.shares_names for _, variable in pairs)
        self._read = jit(lambda: read([variable for _, variable in pairs]))

    def stale(self) -> None:
        """Note that steps have changed the variables of dflow."""
        self._is_fresh = False

    def pull(self) -> None:
        """Copy the values into the Keras model, unless it has them."""
        if self._is_fresh:
            return
        self._is_fresh = True
        values = self._read() if self._are_on_tasks else read([variable for _, variable in self._pairs])
        for (given, _), value in zip(self._pairs, values, strict=True):
            given.assign(value)
        self._look()

    def changed(self) -> dict[int, Any]:
        """Return the values that callbacks have changed since the last copy, by the number of their pair."""
        found = {
            number: given.value
            for number, ((given, _), seen) in enumerate(zip(self._pairs, self._seen, strict=True))
            if given.value is not seen
        }
        self._look()
        return found

    def push(self, changed: dict[int, Any]) -> None:
        """Set variables of dflow to these values."""
        for number, value in changed.items():
            self._pairs[number][1].assign(jnp.asarray(value))

    def _look(self) -> None:
        self._seen = [given.value for given, _ in self._pairs]

    @contextmanager
    def shown(self, instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Show callbacks a Keras model with the live values and with these methods in place of the model's."""
        own = type(self._model).jax_state_sync

        def sync() -> None:
            # A callback's own `evaluate` or `predict` keeps its values outside of the model, until it asks for them.
            if getattr(self._model, "_jax_state", None) is None:
                self.pull()
            else:
                own(self._model)

        with replaced(self._model, {**instead, "jax_state_sync": sync}):
            yield


@contextmanager
def replaced(model: Any, instead: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of a Keras model's class by these methods, within the context."""
    attributes = vars(model)
    before = {name: attributes[name] for name in instead if name in attributes}
    attributes.update(instead)
    try:
        yield
    finally:
        for name in instead:
            attributes.pop(name, None)
        attributes.update(before)


def to_text(values: dict[int, Any]) -> dict[str, list[Any]]:
    """Return arrays by number as values of JSON."""
    return {
        str(number): [str(value.dtype), list(value.shape), base64.b64encode(np.asarray(value).tobytes()).decode()]
        for number, value in values.items()
    }


def from_text(text: dict[str, list[Any]]) -> dict[int, Any]:
    """Return what `to_text` was given."""
    return {
        int(number): np.frombuffer(base64.b64decode(data), jnp.dtype(dtype)).reshape(shape)
        for number, (dtype, shape, data) in text.items()
    }


class KeptWeights:
    """The weights that a callback has taken last, such as those of the best epoch, where the variables are.

    Why: the chief's next process has them too, after a death. A standalone process needs none.
    """

    def __init__(self, variables: Sequence[Variable], make: Callable[[], Any], name: str) -> None:
        self._variables, self._make, self._name = variables, make, name
        self._kept: list[Variable] | None = None
        self._copy: Any = None

    def keep(self) -> None:
        """Copy the present weights."""
        kept = self._made()
        if self._copy is None:

            def copy() -> None:
                for target, source in zip(kept, self._variables, strict=True):
                    target.assign(source.read())

            self._copy = jit(copy)
        self._copy()

    def weights(self) -> list[Any]:
        """Return the weights that were kept last."""
        return [np.asarray(variable.read()) for variable in self._made()]

    def _made(self) -> list[Variable]:
        if self._kept is None:
            with self._make():
                self._kept = [
                    Variable(jnp.zeros(one.shape, one.dtype), name=f"{self._name}/{number}", trainable=False)
                    for number, one in enumerate(self._variables)
                ]
        return self._kept


def refuse_weights(model: str) -> Any:
    """Raise for a callback that takes the weights of a model with tables."""
    raise VariableError(
        f"model {model!r}: a callback asks for its weights: expected a model of Keras's own layers, got one with "
        "dflow.keras.ShardedEmbedding, whose tables are on tasks",
        "leave out restore_best_weights, and keep versions by dflow.CheckpointManager(..., best=...) of model.state",
    )


def refuse_changes(strategy: str) -> Any:
    """Raise for a callback that changes variables of several processes between two batches."""
    raise TrainingError(
        f"fit under {strategy}: expected callbacks that change variables at the ends of epochs, got one that does so "
        "after a batch, where each worker has its own copy",
        "change them in on_epoch_begin or on_epoch_end, or train by Async or Sync",
    )
