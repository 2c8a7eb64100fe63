"""State that an optimizer trains: slots, tables, and models of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow
from tests.composition.kind import FIRST, TABLE, Batch, Held, Kind, Reference, whole


class Trained(Reference):
    """Parameters that optax trains. `loss` and `seen` take them and a batch."""

    def __init__(self, parameters: Any, tx: Any, loss: Any, seen: Any, state: Any = None) -> None:
        self.parameters, self.tx, self.loss, self.seen = jax.tree.map(jnp.asarray, parameters), tx, loss, seen
        self.slots = tx.init(self.parameters)
        self.shown = state or (lambda parameters: parameters)

    def train(self, given: Batch) -> float:
        seen = float(self.seen(self.parameters, given))
        gradients = jax.grad(self.loss)(self.parameters, given)
        updates, self.slots = self.tx.update(gradients, self.slots, self.parameters)
        self.parameters = optax.apply_updates(self.parameters, updates)
        return seen

    def state(self) -> Any:
        return self.shown(jax.tree.map(np.asarray, self.parameters))


class TrainedKind(Kind):
    """State that an optimizer trains: subclasses give the variables, the loss and the number that a step returns."""

    trains = True

    def held(self, variables: Any, optimizer: Any, loss: Any, seen: Any, items: Any, state: Any) -> Held:
        """Return the held state; `loss` and `seen` take a batch."""

        def gradients(given: Batch) -> Any:
            return dflow.grad(lambda: loss(given), variables)(), None

        def apply(gradients: Any, _: Any) -> None:
            optimizer.apply(gradients)

        def step(given: Batch) -> jax.Array:
            before = seen(given)
            apply(*gradients(given))
            return before

        return Held(step, state, items, seen, gradients, apply)


#: Ten chains of optax. The gradient of their loss does not depend on the weights, so late steps are exact too.
CHAINS: dict[str, Callable[[], Any]] = {
    "sgd with a schedule": lambda: optax.sgd(optax.linear_schedule(0.5, 0.125, 4)),
    "momentum": lambda: optax.sgd(0.5, momentum=0.5, nesterov=True),
    "adam": lambda: optax.adam(0.5),
    "clip, adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.5)),
    "adagrad": lambda: optax.adagrad(0.5),
    "rmsprop": lambda: optax.rmsprop(0.5),
    "lion": lambda: optax.lion(0.5),
    "lamb": lambda: optax.lamb(0.5),
    "adafactor": lambda: optax.adafactor(0.5, min_dim_size_to_factor=2),
    "multi-steps": lambda: optax.MultiSteps(optax.sgd(0.5), 2),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.5),
}
COEFFICIENTS = np.array([[1, -2], [0.5, 1], [2, -1], [-1, 0.25]], np.float32)


class Slots(TrainedKind):
    """A weight matrix and the slots of an optimizer."""

    family = "optimizer slots"

    def __init__(self, chain: str) -> None:
        self.chain, self.name = CHAINS[chain], f"slots of {chain}"

    @staticmethod
    def _loss(w: Any, given: Batch) -> Any:
        return jnp.mean(given["x"]) * jnp.sum(w * COEFFICIENTS)

    @staticmethod
    def _seen(w: Any, given: Batch) -> Any:
        return jnp.sum(w * jnp.mean(given["x"]))

    def make(self, prefix: str) -> Held:
        w = dflow.Variable(lambda: jnp.ones((4, 2)), name=f"{prefix}/w")
        optimizer = dflow.Optimizer(self.chain(), [w], name=f"{prefix}/optimizer")
        return self.held(
            [w],
            optimizer,
            lambda given: self._loss(w.read(), given),
            lambda given: self._seen(w.read(), given),
            {"w": w, "optimizer": optimizer},
            lambda: whole(w),
        )

    def reference(self) -> Reference:
        return Trained(np.ones((4, 2), np.float32), self.chain(), self._loss, self._seen)


class Table(TrainedKind):
    """An embedding: rows by ids, and bags of them."""

    family = "embeddings"
    name = "embedding"
    #: Whether changed rows are marked.
    tracks = True
    divided_otherwise: ClassVar[dict[str, int]] = {"shards": 3}

    def embedding(self, prefix: str, shards: int) -> dflow.Embedding:
        """Make the table."""
        return dflow.Embedding(
            TABLE,
            2,
            name=f"{prefix}/table",
            initializer=lambda *_: jnp.asarray(FIRST),
            shards=shards,
            track_changes=self.tracks,
        )

    def ids(self, given: Batch) -> Any:
        """Return the ids of a batch as the table takes them."""
        return given["ids"]

    def find(self, table: dflow.Embedding, ids: Any) -> Any:
        """Return what a lookup takes within the loss."""
        return ids

    def make(self, prefix: str, shards: int = 2) -> Held:
        table = self.embedding(prefix, shards)
        optimizer = dflow.Optimizer(optax.sgd(0.5), [table], name=f"{prefix}/optimizer")

        def look(given: Batch) -> jax.Array:
            return table(self.ids(given)).sum()

        def gradients(given: Batch) -> Any:
            found = self.find(table, self.ids(given))

            def loss() -> Any:
                return jnp.mean(given["x"][:, None] * table(found))

            return dflow.grad(loss, [table])(), found

        def apply(gradients: Any, found: Any) -> None:
            optimizer.apply(gradients, **({"found": found} if isinstance(found, dflow.FoundIds) else {}))

        def step(given: Batch) -> jax.Array:
            seen = table(self.find(table, self.ids(given))).sum()
            apply(*gradients(given))
            return seen

        held = Held(step, lambda: whole(table(self.all_ids())), {"table": table}, look, gradients, apply)
        self.prepare(held)
        return held

    def prepare(self, held: Held) -> None:
        """Bring the table to the state of its reference."""

    def all_ids(self) -> Any:
        """Return each id once, in order."""
        return np.arange(TABLE)

    def reference(self) -> Reference:
        return Trained(
            FIRST,
            optax.sgd(0.5),
            lambda table, given: jnp.mean(given["x"][:, None] * table[given["ids"]]),
            lambda table, given: table[given["ids"]].sum(),
        )


class Bags(Table):
    """An embedding whose rows are looked up in bags of different sizes."""

    name = "embedding in bags"

    def make(self, prefix: str, shards: int = 2) -> Held:
        table = self.embedding(prefix, shards)
        optimizer = dflow.Optimizer(optax.sgd(0.5), [table], name=f"{prefix}/optimizer")

        def bags(given: Batch) -> Any:
            segments = jnp.arange(given["ids"].shape[0]) // 2
            return table.bag(given["ids"], weights=given["x"], segments=segments, bags=given["ids"].shape[0])

        return self.held(
            [table],
            optimizer,
            lambda given: 2 * jnp.mean(bags(given)) / 2,
            lambda given: bags(given).sum(),
            {"table": table},
            lambda: whole(table),
        )

    def reference(self) -> Reference:
        return Trained(
            FIRST,
            optax.sgd(0.5),
            lambda table, given: jnp.mean(given["x"][:, None] * table[given["ids"]]),
            lambda table, given: (given["x"][:, None] * table[given["ids"]]).sum(),
        )


class Vocabulary(Table):
    """An embedding with rows for ids as they come, here known from a first step that trains nothing."""

    family = "vocabularies"

    divided_otherwise: ClassVar[dict[str, int]] = {"shards": 1}

    def __init__(self, name: str, ids: Sequence[Any]) -> None:
        self.name, self._ids = f"vocabulary of {name}", np.array(ids)

    def embedding(self, prefix: str, shards: int) -> dflow.Embedding:
        return dflow.Embedding(
            64,
            2,
            name=f"{prefix}/table",
            initializer=lambda key, shape, dtype: jnp.ones(shape, dtype),
            shards=shards,
            vocabulary=dflow.Vocabulary(),
        )

    def batch(self, given: Batch) -> Batch:
        return {**given, "wide": dflow.wide_ids(self._ids[given["ids"]])}

    def plain(self, given: Batch) -> Batch:
        return {**given, "wide": {"high": given["wide"].high, "low": given["wide"].low}}

    def rebuilt(self, plain: Batch) -> Batch:
        return {**plain, "wide": dflow.WideIds(plain["wide"]["high"], plain["wide"]["low"])}

    def ids(self, given: Batch) -> Any:
        return given["wide"]

    def find(self, table: dflow.Embedding, ids: Any) -> Any:
        return table.find(ids)

    def all_ids(self) -> Any:
        return dflow.wide_ids(self._ids)

    def prepare(self, held: Held) -> None:
        known = {"x": np.zeros(TABLE, np.float32), "ids": np.arange(TABLE, dtype=np.int32)}
        dflow.jit(held.step)(self.batch(known))

    def reference(self) -> Reference:
        return Trained(
            np.ones_like(FIRST),
            optax.sgd(0.5),
            lambda table, given: jnp.mean(given["x"][:, None] * table[given["ids"]]),
            lambda table, given: table[given["ids"]].sum(),
        )


KERNEL = np.array([[1.0], [0.5]], np.float32)


def _inputs(given: Batch) -> Any:
    return jnp.stack([given["x"], given["x"] * given["x"]], axis=1)


class Model(TrainedKind):
    """A dense layer of a library: `made` returns its parameters and a function of parameters and inputs."""

    family = "models of libraries"

    def __init__(self, name: str, made: Callable[[], tuple[Any, Callable[[Any, Any], Any], Any]]) -> None:
        self.name, self._made = name, made

    def make(self, prefix: str) -> Held:
        parameters, forward, kernel = self._made()
        variables = dflow.variables(parameters, prefix=f"{prefix}/")
        optimizer = dflow.Optimizer(optax.sgd(0.5), variables, name=f"{prefix}/optimizer")

        def outputs(given: Batch) -> Any:
            return forward(dflow.read(variables), _inputs(given))

        return self.held(
            variables,
            optimizer,
            lambda given: jnp.mean(outputs(given)),
            lambda given: outputs(given).sum(),
            {"model": variables, "optimizer": optimizer},
            lambda: whole(kernel(dflow.read(variables))),
        )

    def reference(self) -> Reference:
        return Trained(
            KERNEL,
            optax.sgd(0.5),
            lambda kernel, given: jnp.mean(_inputs(given) @ kernel),
            lambda kernel, given: (_inputs(given) @ kernel).sum(),
        )


def nnx_layer() -> tuple[Any, Any, Any]:
    from flax import nnx

    layer = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(KERNEL))
    definition, parameters = nnx.split(layer)
    return parameters, lambda p, x: nnx.merge(definition, p)(x), lambda p: jax.tree.leaves(p)[0]


def equinox_layer() -> tuple[Any, Any, Any]:
    import equinox as eqx

    layer = eqx.nn.Linear(2, 1, use_bias=False, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(KERNEL.T))
    arrays, rest = eqx.partition(layer, eqx.is_inexact_array)
    return arrays, lambda p, x: jax.vmap(eqx.combine(p, rest))(x), lambda p: jax.tree.leaves(p)[0].T


class Keras(TrainedKind):
    """A Keras model with its compiled optimizer, trained by its own `train_step`."""

    family = "models of libraries"
    name = "Keras model"
    library = "keras"

    def make(self, prefix: str) -> Held:
        import keras

        import dflow.keras

        name = prefix.replace("/", "-").replace(" ", "-")
        dense = keras.layers.Dense(1, use_bias=False, name="dense")
        model = keras.Sequential([keras.Input((2,)), dense], name=name)
        dense.set_weights([KERNEL])
        model.compile(keras.optimizers.SGD(0.5), loss=lambda wanted, outputs: (wanted * outputs).sum(-1))
        training = dflow.keras.Model(model)
        kernel = training.trainable[f"{name}/dense/kernel"]

        def look(given: Batch) -> Any:
            return training(_inputs(given)).sum()

        def step(given: Batch) -> Any:
            seen = look(given)
            training.train_step(_inputs(given), jnp.ones((given["x"].shape[0], 1)))
            return seen

        return Held(step, lambda: whole(kernel), training.state, look)

    def reference(self) -> Reference:
        return Model("", nnx_layer).reference()
