"""Make `formatN.zip` beside this file: an export of format N, by a checkout of dflow that writes it, which is named by

    PYTHONPATH=CHECKOUT JAX_TRACEBACK_IN_LOCATIONS_LIMIT=0 python tests/dflow/exporting/exports/make_tables.py N

Its functions look up rows of a table in shards and of one with a vocabulary, and train a step. `expected.json` has each
call, in order: the name of the function, the arguments with their dtypes, and the result.
"""

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

FORM = int(sys.argv[1])
#: Ids that are looked up; the last one has no row.
ALL: Any = ["a", "Zoë", ""] if FORM >= 5 else np.array([2**40 + 1, 7, 2**63 + 5], np.uint64)
KNOWN, TRAINED = (ids if FORM >= 5 else dflow.wide_ids(ids) for ids in (ALL, ALL[:2]))

items = dflow.Embedding(10, 2, name="items", shards=2)
users = dflow.Embedding(16, 2, name="users", shards=2, vocabulary=dflow.Vocabulary(bucket=8))
layer = dflow.Variable(jnp.full((2, 3), 0.5), name="layer")
optimizer = dflow.Optimizer(optax.adagrad(0.125), [items, layer], name="adagrad")
rate = dflow.Optimizer(optax.sgd(0.5), [users], name="sgd")


def add(ids: Any) -> None:
    found = users.find(ids)
    rate.apply(dflow.grad(lambda: jnp.sum(users(found)), [users])(), found=found)


def train(ids: Any) -> Any:
    value, gradients = dflow.value_and_grad(lambda: jnp.sum((items(ids) @ layer) ** 2), [items, layer])()
    optimizer.apply(gradients)
    return value


dflow.jit(add)(TRAINED)
ids, i32 = np.array([0, 9, 4], np.int32), jnp.int32
of_user = "b" if FORM >= 4 else "3"  # a letter for the size where the format can have it
made: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("look", lambda ids: items(ids) @ layer, [ids], [dflow.spec("b" if FORM >= 3 else "3", i32)])
]
if FORM >= 5:
    made += [("user", users, [KNOWN], [dflow.spec(of_user, np.str_)])]
else:
    half = dflow.spec(of_user, jnp.uint32)
    made += [("user", lambda high, low: users(dflow.WideIds(high, low)), [KNOWN.high, KNOWN.low], [half, half])]
if FORM >= 4:
    specs = [dflow.spec("b", i32), dflow.spec("b", i32), dflow.spec("k", jnp.float32)]
    bags = [ids, np.array([1, 1, 0], np.int32), np.zeros(2, np.float32)]
    made += [("bags", lambda ids, of, rows: items.bag(ids, segments=of, bags=rows.shape[0]), bags, specs)]
made += [("train", train, [ids], [dflow.spec("3", i32)])] * 2
with tempfile.TemporaryDirectory() as folder:
    functions = {name: (fn, *specs) for name, fn, _, specs in made}
    path = Path(dflow.export(functions, platforms=["cpu"]).save(Path(folder) / "made"))
    assert json.loads((path / "manifest.json").read_text())["format"] == FORM
    expected = [
        (name, [(np.asarray(one).tolist(), getattr(one, "dtype", np.dtype(str)).name) for one in given],
         np.asarray(dflow.jit(fn)(*given)).tolist())
        for name, fn, given, _ in made
    ]  # fmt: skip
    (path / "expected.json").write_text(json.dumps(expected))
    shutil.make_archive(str(Path(__file__).with_name(f"format{FORM}")), "zip", path)
