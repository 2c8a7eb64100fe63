"""Train a click-through model on files of Parquet that need not fit into memory; AUC beside training.

    python examples/clicks_from_parquet.py                                                   one process
    dflow launch --ps 1 --workers 2 --job reader=2 examples/clicks_from_parquet.py           two tasks read for them

Users, films and cities are strings, some cities and ages are missing, and each user has seen up to 5 films. The rows
are drawn from a hidden model, in pieces, into the folder of the run. A run that was killed goes on by the same command:
the position in the files is the number of the step, so each row is used once an epoch, whichever process was killed.
"""

import argparse
import pathlib
import time

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet as pq

import dflow

USERS, FILMS, SEEN, SIZE, TEXT = 5_000, 1_000, 5, 16, 64
CITIES = np.array(["Oslo", "Lima", "Pune", "Kyiv", "Fes"])
PIECE, HELD_OUT = 100_000, 4_000
#: By column, the table of its names.
TABLES = {"user": "user", "film": "film", "city": "city", "seen": "film"}
#: What stands for missing values in the columns that are read, and the number of films in each row.
READ = {
    "missing": {"city": "unknown", "age": 40, "seen": "none"},
    "lengths": {"seen": SEEN},
    "ids": [*TABLES],
}


def draw(first: int, count: int) -> pa.Table:
    """Draw rows from number `first` on; `text` stands for a vector of the film's description."""
    hidden, draw = np.random.default_rng(0), np.random.default_rng([1, first])
    tastes, kinds = hidden.normal(size=(USERS, 4)), hidden.normal(size=(FILMS, 4))
    words = hidden.normal(size=(4, TEXT)) / 4
    user, film = draw.integers(USERS, size=count), (FILMS * draw.random(count) ** 2).astype(int)
    lengths = draw.integers(SEEN + 1, size=count)
    seen, age = draw.integers(FILMS, size=lengths.sum()), draw.integers(18, 80, size=count)
    odds = (tastes[user] * kinds[film]).sum(1) + 2 * kinds[film, 0] + (age - 40) / 40 + draw.logistic(size=count)
    text = (kinds[film] @ words + draw.normal(size=(count, TEXT))).astype(np.float32)

    def named(kind: str, numbers: np.ndarray, most: int) -> pa.Array:
        names = [f"{kind}-{number:06}" for number in range(most)]
        return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), names).cast(pa.string())

    return pa.table(
        {
            "row": np.arange(first, first + count, dtype=np.int32),
            "user": named("user", user, USERS),
            "film": named("film", film, FILMS),
            "city": pa.array(CITIES[user % 5], mask=draw.random(count) < 0.1),
            "age": pa.array(age, pa.int16(), mask=draw.random(count) < 0.1),
            "seen": pa.ListArray.from_arrays(
                np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), named("film", seen, FILMS)
            ),
            "text": pa.FixedSizeListArray.from_arrays(text.ravel(), TEXT),
            "clicked": (odds > 0).astype(np.float32),
        }
    )


def draw_files(folder: pathlib.Path, rows: int) -> pathlib.Path:
    """Write the missing files of `rows` rows, one process at a time; return their folder."""
    files = folder / f"{rows}-rows"
    files.mkdir(parents=True, exist_ok=True)
    pieces = [(first, min(PIECE, rows - first), f"rows-{first:012}") for first in range(0, rows, PIECE)]
    with filelock.FileLock(files / "drawing.lock"):
        for first, count, name in [*pieces, (rows, HELD_OUT, "held-out")]:
            if not (files / f"{name}.parquet").exists():
                pq.write_table(draw(first, count), files / "part", row_group_size=PIECE // 4)
                (files / "part").rename(files / f"{name}.parquet")
    return files


class Model:
    """Two towers of names and a deep part; the names get rows of their tables when they are first used."""

    def __init__(self) -> None:
        self.tables = {
            name: dflow.Embedding(rows, SIZE, vocabulary=dflow.Vocabulary(), name=name)
            for name, rows in {"user": USERS * 2, "film": FILMS * 2, "city": 64}.items()
        }
        draw, inputs = jax.nn.initializers.he_normal(), 4 * SIZE + TEXT + 1
        self.deep = dflow.variables(
            {
                "hidden": lambda: draw(jax.random.key(0), (inputs, 64)),
                "bias": lambda: jnp.zeros(64),
                "out": lambda: draw(jax.random.key(1), (64, 1)),
            },
            prefix="deep/",
        )
        self.optimizer = dflow.Optimizer(
            optax.adagrad(0.1, initial_accumulator_value=1e-6), [*self.tables.values(), self.deep], name="adagrad"
        )

    def find(self, batch: dict) -> dict:
        return {name: self.tables[TABLES[name]].find(batch[name]) for name in TABLES}

    def log_odds(self, batch: dict, found: dict) -> jax.Array:
        user, film, city, seen = (self.tables[table](found[name]) for name, table in TABLES.items())
        inputs = [user, film, city, seen.mean(1), batch["text"], batch["age"][:, None].astype(jnp.float32) / 40 - 1]
        hidden = jax.nn.relu(jnp.concatenate(inputs, 1) @ self.deep["hidden"] + self.deep["bias"])
        return (user * film).sum(1) + (hidden @ self.deep["out"])[:, 0]

    def train_step(self, batch: dict) -> dict:
        found = self.find(batch)

        def loss() -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(self.log_odds(batch, found), batch["clicked"]).mean()

        value, gradients = dflow.value_and_grad(loss, self.optimizer.variables)()
        self.optimizer.apply(gradients, found=[*found.values()])
        return {"loss": value}

    def measure(self, batch: dict) -> dict:
        return {"auc": dflow.metrics.auc(self.log_odds(batch, batch), batch["clicked"])}


class Rate(dflow.Callback):
    """Examples per second of this worker, without its first steps, which compile."""

    def __init__(self, batch: int) -> None:
        self.batch, self.steps, self.began_s, self.rate = batch, -20, 0.0, 0.0

    def on_step(self, steps: int, result: dict) -> None:
        self.steps += 1
        if self.steps == 0:
            self.began_s = time.perf_counter()
        if self.steps > 0:
            self.rate = self.steps * self.batch / (time.perf_counter() - self.began_s)


def train(cluster, data, files: pathlib.Path, given: argparse.Namespace) -> None:
    with cluster.parameter_servers():
        model = Model()
        used = dflow.Variable(lambda: jnp.zeros(given.rows, jnp.int32), name="used")

    @dflow.jit
    def train_step(batch: dict) -> dict:
        used.scatter_add(batch["row"], jnp.ones(given.batch, jnp.int32))
        return model.train_step(batch)

    held_out = dflow.data.batches(dflow.data.read(files / "held-out.parquet", **READ), HELD_OUT // 2)
    rate = Rate(given.batch)
    state = [*model.tables.values(), model.deep, model.optimizer, used]
    with dflow.CheckpointManager(files / "checkpoints", state, every=given.every) as manager:
        trainer = dflow.Trainer(
            train_step,
            dflow.distributed.Async(cluster),
            evaluation=(dflow.jit(model.measure), [*held_out]),
            evaluate_every=given.every,
            checkpoints=manager,
            callbacks=[rate],
        )
        result = trainer.run(data, steps=len(data), name="train")
    cluster.report(f"examples/s of worker {cluster.index}", rate.rate)
    if cluster.elect("report"):
        times = jnp.unique(used.read()).tolist()
        auc = result.evaluation["auc"]
        print(f"{result.steps} steps: AUC {auc:.4f}; each row was used {times} times; {rate.rate:.0f} examples/s here")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=60_000, help="rows to draw, a multiple of the batch")
    options.add_argument("--batch", type=int, default=500, help="examples in a batch")
    options.add_argument("--epochs", type=int, default=1)
    options.add_argument("--every", type=int, default=100, help="steps between checkpoints, and evaluations")
    options.add_argument("--folder", default="run", type=pathlib.Path)
    options.add_argument("--in-memory", action="store_true", help="read all rows first, to compare")
    given = options.parse_args()
    files = draw_files(given.folder, given.rows)
    cluster = dflow.connect()
    rows = dflow.data.read(files / "rows-*.parquet", parts=2, **READ)
    shuffle: int | bool = 20_000
    if given.in_memory:
        rows, shuffle = rows.rows(range(len(rows))), True
    data = dflow.data.batches(rows, given.batch, shuffle=shuffle, seed=1, epochs=given.epochs, drop_remainder=True)
    if cluster.task.startswith("/job:reader"):
        dflow.data.serve(data, cluster)
    else:
        train(cluster, dflow.data.served(data, cluster), files, given)
    cluster.close()


if __name__ == "__main__":
    main()
