"""Kinds of state: how a user makes one, a step that reads and writes it, and the same in plain JAX and NumPy.

A step takes a batch and returns a number that depends on the state before it. All numbers are small whole ones or
binary fractions, so that sums are exact in any order and dtype. What several workers do at the same time commutes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

#: Rows of a batch, rows of a table, and the first value of each row of a table.
ROWS, TABLE = 4, 6
FIRST = np.arange(TABLE * 2, dtype=np.float32).reshape(TABLE, 2) / 4

Batch = dict[str, Any]


def batch(number: int) -> Batch:
    """Batch `number`: x f32[4], ids i32[4] below 6 with repetitions, round i32[4], each row the same number."""
    return {
        "x": np.array([1, 2, 0, 1], np.float32) + number % 2,
        "ids": np.array([number, 5, number, 2], np.int32) % TABLE,
        "round": np.full(ROWS, number, np.int32),
    }


def whole(value: Any) -> Any:
    """Return a value as a NumPy array, also one that is divided over the devices of several processes."""
    value = value.read() if dflow.is_variable(value) or isinstance(value, dflow.ShardedVariable) else value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        from jax.experimental.multihost_utils import process_allgather

        value = process_allgather(value, tiled=True)
    return np.asarray(value)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the batch with the rows of several."""
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


def stacked(batches: Sequence[Batch]) -> Batch:
    """Return batches along a new first axis, as a `scan` takes them."""
    return jax.tree.map(lambda *parts: np.stack(parts), *batches)


@dataclass
class Held:
    """State that a program holds, and what it does with it."""

    #: Uses and writes the state once; returns f32[], in traced code or outside.
    step: Callable[[Batch], jax.Array]
    #: The content, as NumPy arrays; called once, at the end, since it may empty a queue.
    state: Callable[[], Any]
    #: What `dflow.save` is given.
    items: Any
    #: Reads the state, and writes nothing; None for state that can't be read without a change.
    look: Callable[[Batch], jax.Array] | None = None
    #: The gradients of a step and what else its update takes, and the update, for state that is trained.
    gradients: Callable[[Batch], tuple[Any, Any]] | None = None
    apply: Callable[[Any, Any], None] | None = None


class Reference:
    """The same state in plain JAX and NumPy. In a step of several workers each writes, and their gradient is one."""

    def write(self, given: Batch) -> float | None:
        """Do what a step does without an optimizer; return its result."""
        return None

    def train(self, given: Batch) -> float | None:
        """Do what a step does with its optimizer, with the rows of all workers; return its result."""
        return None

    def step(self, given: Batch) -> float:
        """Do a whole step of one process; return its result."""
        written, trained = self.write(given), self.train(given)
        return written if written is not None else trained  # type: ignore[return-value]

    def state(self) -> Any:
        """Return the content, structured as that of `Held.state`."""
        raise AssertionError("a reference has a state")


class Kind:
    """A kind of state. `name` is what a user calls it; kinds of one `family` share a column of the docs."""

    name: str
    family: str
    #: The library that it needs, where that may be absent.
    library: str | None = None
    #: Whether an optimizer changes it, as synchronous strategies want.
    trains = False
    #: Options of `make` that give another division into shards, where there are shards.
    divided_otherwise: ClassVar[dict[str, int]] = {}

    def make(self, prefix: str, **division: int) -> Held:
        """Make the state, with names that begin with `prefix`, in the scope that the caller opened."""
        raise AssertionError("a kind can be made")

    def reference(self) -> Reference:
        """Return new state of plain JAX and NumPy."""
        raise AssertionError("a kind has a reference")

    def batch(self, given: Batch) -> Batch:
        """Return what this kind's step takes for a batch."""
        return given

    def plain(self, given: Batch) -> Batch:
        """Return a batch in containers and arrays alone, as an export takes it; `rebuilt` is the way back."""
        return given

    def rebuilt(self, plain: Batch) -> Batch:
        """Return the batch of a plain one."""
        return plain

    def __repr__(self) -> str:
        return self.name


# --- variables -----------------------------------------------------------------------------------------------------


class Numbers(Kind):
    """A variable of numbers, which each step adds to."""

    family = "variables of numbers"

    def __init__(self, dtype: Any) -> None:
        self.dtype = jnp.dtype(dtype)
        self.name = f"variable {self.dtype.name}"
        self.first = np.array([0, 2, 1]).astype(self.dtype)

    def _amount(self, given: Batch) -> Any:
        return given["x"].sum().astype(self.dtype)

    def make(self, prefix: str) -> Held:
        v = dflow.Variable(lambda: jnp.asarray(self.first), name=f"{prefix}/v")

        def look(given: Batch) -> jax.Array:
            return jnp.sum(v.read().real.astype(jnp.float32))

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            v.assign_add(jnp.broadcast_to(self._amount(given), (3,)))
            return seen

        return Held(step, lambda: whole(v), {"v": v}, look)

    def reference(self) -> Reference:
        amount, first = self._amount, self.first

        class Sum(Reference):
            value = first

            def write(self, given: Batch) -> float:
                seen = float(self.value.real.astype(np.float32).sum())
                self.value = self.value + amount(given)
                return seen

            def state(self) -> Any:
                return self.value

        return Sum()


class Marked(Kind):
    """A variable of a dtype without sums, which each step assigns."""

    family = "variables of bool and keys"

    def __init__(self, name: str, value_of: Callable[[Any], Any], seen: Callable[[Any], Any]) -> None:
        self.name, self._value_of, self._seen = name, value_of, seen

    def make(self, prefix: str) -> Held:
        v = dflow.Variable(lambda: self._value_of(jnp.int32(100)), name=f"{prefix}/v")

        def look(given: Batch) -> jax.Array:
            return self._seen(v.read())

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            v.assign(self._value_of(given["round"][0]))
            return seen

        return Held(step, lambda: whole(v), {"v": v}, look)

    def reference(self) -> Reference:
        kind = self

        class Last(Reference):
            value = kind._value_of(jnp.int32(100))

            def write(self, given: Batch) -> float:
                seen = float(kind._seen(self.value))
                self.value = kind._value_of(jnp.asarray(given["round"])[0])
                return seen

            def state(self) -> Any:
                return whole(self.value)

        return Last()


class Container(Numbers):
    """A variable in a named lifetime, beside another one of another lifetime with the same name."""

    family = "containers"

    def __init__(self) -> None:
        super().__init__(np.float32)
        self.name = "container"

    def make(self, prefix: str) -> Held:
        name = re.sub(r"[^\w.-]", "-", prefix)
        with dflow.container(f"{name}-other"):
            other = super().make("inner")
        with dflow.container(name):
            held = super().make("inner")
        held.state = lambda state=held.state: (state(), other.state())  # type: ignore[misc]
        return held

    def reference(self) -> Reference:
        reference, first = super().reference(), self.first
        reference.state = lambda state=reference.state: (state(), first)  # type: ignore[method-assign, misc]
        return reference


# --- rows ----------------------------------------------------------------------------------------------------------


class Shards(Kind):
    """An array in shards on several tasks, whose rows a step looks up and adds to."""

    family = "sharded variables"

    #: Whether changed rows are marked.
    tracks = True

    def __init__(self, by: str) -> None:
        self.by, self.name = by, f"sharded by {by}"
        self.divided_otherwise = {"shards": 1 if by == "columns" else 3}  # type: ignore[misc]

    def make(self, prefix: str, shards: int = 2) -> Held:
        options = {"by": self.by, "shards": shards, "track_changes": self.tracks and self.by != "columns"}
        table = dflow.ShardedVariable(lambda: jnp.asarray(FIRST), name=f"{prefix}/table", **options)

        def look(given: Batch) -> jax.Array:
            return table.gather(given["ids"]).sum()

        def step(given: Batch) -> jax.Array:
            seen = look(given)
            table.scatter_add(given["ids"], given["x"][:, None] * jnp.ones((1, 2), jnp.float32))
            return seen

        return Held(step, lambda: whole(table), {"table": table}, look)

    def reference(self) -> Reference:
        class Rows(Reference):
            def __init__(self) -> None:
                self.table = FIRST.copy()

            def write(self, given: Batch) -> float:
                seen = float(self.table[given["ids"]].sum())
                np.add.at(self.table, given["ids"], given["x"][:, None])
                return seen

            def state(self) -> Any:
                return self.table.copy()

        return Rows()


# --- trained state -------------------------------------------------------------------------------------------------


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


# --- models of libraries -------------------------------------------------------------------------------------------

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


def _nnx() -> tuple[Any, Any, Any]:
    from flax import nnx

    layer = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(KERNEL))
    definition, parameters = nnx.split(layer)
    return parameters, lambda p, x: nnx.merge(definition, p)(x), lambda p: jax.tree.leaves(p)[0]


def _equinox() -> tuple[Any, Any, Any]:
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
        return Model("", _nnx).reference()


# --- random numbers, queues, accumulators --------------------------------------------------------------------------


class Random(Kind):
    """A generator, which each step splits."""

    family = "generators"
    name = "generator"

    def make(self, prefix: str) -> Held:
        generator = dflow.Generator(7, name=f"{prefix}/generator")

        def step(given: Batch) -> jax.Array:
            return jax.random.uniform(generator.split())

        return Held(step, lambda: whole(generator.key), {"generator": generator})

    def reference(self) -> Reference:
        class Key(Reference):
            def __init__(self) -> None:
                self.key = jax.random.key(7)

            def write(self, given: Batch) -> float:
                self.key, drawn = jax.random.split(self.key)
                return float(jax.random.uniform(drawn))

            def state(self) -> Any:
                return np.asarray(jax.random.key_data(self.key))

        return Key()


class Queue(Kind):
    """A queue with 8 elements, from which each step takes one, and to which it gives the sum of that and its batch."""

    family = "queues"

    def __init__(self, kind: type[Any], element: Callable[[Any], Any], number: Callable[[Any], Any]) -> None:
        self.kind, self.name, self.element, self.number = kind, kind.__name__, element, number

    def made(self, prefix: str) -> Any:
        """Make the queue, full of the numbers 0 to 7."""
        spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.element(jnp.float32(0)))
        return self.kind(64, spec, name=f"{prefix}/queue")

    def make(self, prefix: str) -> Held:
        queue = self.made(prefix)
        for number in range(8 if int(queue.size()) == 0 else 0):  # another worker may have made it
            queue.enqueue(self.element(jnp.float32(number)))

        def state() -> Any:
            return self.content([float(self.number(queue.dequeue())) for _ in range(int(queue.size()))])

        return Held(lambda given: self.step(queue, given), state, {"queue": queue})

    def step(self, queue: Any, given: Batch) -> Any:
        """Take an element and give one; return the first."""
        taken = self.number(queue.dequeue())
        queue.enqueue(self.element(taken + given["x"].sum()))
        return taken

    def content(self, elements: list[float]) -> Any:
        """Return the elements in a form that does not depend on the order of concurrent steps."""
        return np.sort(elements)

    def reference(self) -> Reference:
        kind = self

        class Elements(Reference):
            def __init__(self) -> None:
                self.elements = [float(number) for number in range(8)]

            def write(self, given: Batch) -> float:
                taken = min(self.elements) if kind.kind is dflow.PriorityQueue else self.elements[0]
                self.elements.remove(taken)
                self.elements.append(taken + float(given["x"].sum()))
                return taken

            def state(self) -> Any:
                return kind.content(self.elements)

        return Elements()


class Shuffled(Queue):
    """A queue that gives a random element: a step returns the number of elements, and their sum is compared."""

    def made(self, prefix: str) -> Any:
        return self.kind(64, 0, jax.ShapeDtypeStruct((), jnp.float32), name=f"{prefix}/queue", seed=0)

    def step(self, queue: Any, given: Batch) -> Any:
        before = queue.size().astype(jnp.float32)
        super().step(queue, given)
        return before

    def content(self, elements: list[float]) -> Any:
        return np.array([len(elements), sum(elements)])

    def reference(self) -> Reference:
        reference = super().reference()
        write = reference.write
        reference.write = lambda given: 8.0 + 0 * write(given)  # type: ignore[method-assign, operator]
        return reference


class Padded(Queue):
    """A queue of elements of several lengths: steps give them, and code outside of steps takes them."""

    def made(self, prefix: str) -> Any:
        return self.kind(64, dflow.PaddedSpec((None,), jnp.float32), name=f"{prefix}/queue")

    def step(self, queue: Any, given: Batch) -> Any:
        before = queue.size().astype(jnp.float32)
        queue.enqueue(given["x"])
        return before

    def reference(self) -> Reference:
        kind = self

        class Elements(Reference):
            def __init__(self) -> None:
                self.elements = [float(number) for number in range(8)]

            def write(self, given: Batch) -> float:
                self.elements.append(float(given["x"].sum()))
                return len(self.elements) - 1.0

            def state(self) -> Any:
                return kind.content(self.elements)

        return Elements()


class Accumulator(Kind):
    """An accumulator, to which each step applies one gradient."""

    family = "accumulators"
    name = "accumulator"

    def make(self, prefix: str) -> Held:
        spec = jax.ShapeDtypeStruct((), jnp.float32)
        sums = dflow.ConditionalAccumulator((spec, spec), name=f"{prefix}/sums", reduction="sum")

        def step(given: Batch) -> jax.Array:
            return sums.apply((given["x"].sum(), jnp.float32(1)), step=0).astype(jnp.float32)

        def state() -> Any:
            sums.apply((jnp.float32(0), jnp.float32(0)), step=0)  # a take waits for one
            return np.asarray(sums.take(1))

        return Held(step, state, {"sums": sums})

    def reference(self) -> Reference:
        class Sum(Reference):
            value = np.zeros(2, np.float32)

            def write(self, given: Batch) -> float:
                self.value = self.value + np.array([given["x"].sum(), 1], np.float32)
                return 1.0

            def state(self) -> Any:
                return self.value

        return Sum()


_QUEUES = (
    Queue(dflow.FIFOQueue, lambda number: number, lambda element: element),
    Shuffled(dflow.RandomShuffleQueue, lambda number: number, lambda element: element),
    Queue(dflow.PriorityQueue, lambda number: (number.astype(jnp.int32), number), lambda element: element[1]),
    Padded(dflow.PaddingFIFOQueue, lambda number: jnp.ones(1, jnp.float32) * number, lambda element: element.sum()),
)
_NUMBERS = ("float32", "bfloat16", "float16", "float8_e5m2", "int8", "int32", "uint8", "complex64")

#: Every kind, by name: a new one is one entry here.
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        *map(Numbers, _NUMBERS),
        Marked("variable bool", lambda n: jnp.stack([n % 2 == 1, n > 1]), lambda v: v.sum().astype(jnp.float32)),
        Marked("variable key", lambda n: jax.random.fold_in(jax.random.key(0), n), jax.random.uniform),
        Container(),
        *map(Shards, ("rows", "modulo", "columns")),
        Table(),
        Bags(),
        Vocabulary("int64", [2**40 + n for n in range(TABLE)]),
        Vocabulary("strings", [f"user {n}" for n in range(TABLE)]),
        *map(Slots, CHAINS),
        Model("NNX model", _nnx),
        Model("Equinox model", _equinox),
        Keras(),
        Random(),
        *_QUEUES,
        Accumulator(),
    )
}
