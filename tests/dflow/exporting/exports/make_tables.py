"""Make `formatN.zip` beside this file: an export of format N, by a checkout of dflow that writes it, which is named by

    PYTHONPATH=CHECKOUT JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 python tests/dflow/exporting/exports/make_tables.py N

Its functions look up rows of a table in shards and of one with a vocabulary, and train a step. `expected.json` has each
call, in order: the name of the function, the arguments with their dtypes, and the result.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import dflow

#: Ids of the vocabulary, of which the last one has no row.
KNOWN = np.array([2**40 + 1, 7, 2**63 + 5], np.uint64)
NAMES = ["a", "Zoë", ""]


def calls(form: int) -> list[tuple[str, Any, list[Any]]]:
    """Return the name, the function and the arguments of each call."""
    items = dflow.Embedding(10, 2, name="items", shards=2)
    users = dflow.Embedding(16, 2, name="users", shards=2, vocabulary=dflow.Vocabulary(bucket=8))
    layer = dflow.Variable(jnp.full((2, 3), 0.5), name="layer")
    optimizer = dflow.Optimizer(optax.adagrad(0.125), [items, layer], name="adagrad")
    rate = dflow.Optimizer(optax.sgd(0.5), [users], name="sgd")
    known = NAMES if form >= 5 else dflow.wide_ids(KNOWN)

    @dflow.jit
    def add(ids: Any) -> None:
        found = users.find(ids)
        rate.apply(dflow.grad(lambda: jnp.sum(users(found)), [users])(), found=found)

    add(known[:2] if form >= 5 else dflow.wide_ids(KNOWN[:2]))

    def train(ids: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.sum((items(ids) @ layer) ** 2), [items, layer])()
        optimizer.apply(gradients)
        return value

    ids = np.array([0, 9, 4], np.int32)
    found: list[tuple[str, Any, list[Any]]] = [("look", lambda ids: items(ids) @ layer, [ids])]
    if form >= 5:
        found += [("user", users, [known])]
    else:
        found += [("user", lambda high, low: users(dflow.WideIds(high, low)), [known.high, known.low])]
    if form >= 4:
        bags = lambda ids, of, rows: items.bag(ids, segments=of, bags=rows.shape[0])  # noqa: E731
        found += [("bags", bags, [ids, np.array([1, 1, 0], np.int32), np.zeros(2, np.float32)])]
    return [*found, ("train", train, [ids]), ("train", train, [ids])]


def spec(form: int, name: str, number: int, argument: Any) -> Any:
    """Return the type of an argument, with a letter for its size where the format can have it."""
    dtype = np.str_ if isinstance(argument, list) else argument.dtype
    is_open = form >= (4 if name == "user" else 3) and name != "train"
    size = len(argument) if not is_open else "b" if number < 2 else "k"
    return dflow.spec((size,), dtype)


def main() -> None:
    form = int(sys.argv[1])
    made = calls(form)
    functions = {
        name: (fn, *(spec(form, name, number, one) for number, one in enumerate(given))) for name, fn, given in made
    }
    expected = []
    with tempfile.TemporaryDirectory() as folder:
        path = dflow.export(functions, platforms=["cpu"]).save(Path(folder) / "made")
        for name, fn, given in made:
            result = dflow.jit(fn)(*given)
            arguments = [[np.asarray(one).tolist(), getattr(one, "dtype", np.dtype(str)).name] for one in given]
            expected.append([name, arguments, np.asarray(result).tolist()])
        assert json.loads((path / "manifest.json").read_text())["format"] == form
        (path / "expected.json").write_text(json.dumps(expected))
        shutil.make_archive(str(Path(__file__).parent / f"format{form}"), "zip", path)


if __name__ == "__main__":
    main()
