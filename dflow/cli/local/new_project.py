"""`dflow new NAME`: a folder with a small project to start from. Nothing that exists is overwritten."""

from __future__ import annotations

import importlib.util
import keyword
import re
from pathlib import Path
from string import Template

from dflow import __version__
from dflow.cli.command import Command
from dflow.tracing.errors import ConfigError

_SCRIPT = '''"""Train a classifier of points in the plane: which of them are inside the unit circle?

    python $name.py                                     one process
    dflow launch --ps 1 --workers 2 $name.py            a parameter task and two workers, asynchronously
"""

import argparse
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow


def batches(*, size: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches without end: points f32[size,2], and labels i32[size], 1 inside the circle."""
    draw = np.random.default_rng(seed)
    while True:
        points = draw.uniform(-2, 2, (size, 2)).astype(np.float32)
        yield points, ((points**2).sum(-1) < 1).astype(np.int32)


def make_model(hidden: int = 32) -> dict[str, dflow.Variable]:
    """Make the variables of two dense layers. Each initial value is computed where its variable lives."""
    return dflow.variables(
        {
            "w1": lambda: jax.random.normal(jax.random.key(0), (2, hidden)),
            "b1": lambda: jnp.zeros(hidden),
            "w2": lambda: 0.1 * jax.random.normal(jax.random.key(1), (hidden, 2)),
            "b2": lambda: jnp.zeros(2),
        }
    )


def predict(model: dict[str, dflow.Variable], points: jax.Array) -> jax.Array:
    """Return the logits f32[n,2] of points f32[n,2]."""
    return jax.nn.relu(points @ model["w1"] + model["b1"]) @ model["w2"] + model["b2"]


def make_steps(model: dict[str, dflow.Variable]) -> tuple[Callable, Callable]:
    """Return a training step and the accuracy of a batch, both compiled."""
    optimizer = dflow.Optimizer(optax.adam(1e-2), model, name="adam")

    @dflow.jit
    def train_step(points, labels):
        def loss():
            return optax.softmax_cross_entropy_with_integer_labels(predict(model, points), labels).mean()

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return {"loss": value}

    @dflow.jit
    def accuracy(points, labels):
        return (predict(model, points).argmax(-1) == labels).mean()

    return train_step, accuracy


def train(cluster, *, steps: int, batch: int = 64) -> float:
    """Train for `steps` steps of all workers together; return the accuracy on points that were not trained on."""
    with cluster.parameter_servers():
        model = make_model()
        train_step, accuracy = make_steps(model)
    own_batches = batches(size=batch, seed=1 + cluster.index)
    for number, metrics in enumerate(dflow.distributed.Async(cluster).run(train_step, own_batches, steps=steps), 1):
        if number % 100 == 0:
            print(f"{number:4d} steps done here, loss {metrics['loss']:.4f}", flush=True)
    return float(accuracy(*next(batches(size=1000, seed=0))))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=500, help="training steps of all workers together")
    given = options.parse_args()

    cluster = dflow.connect()
    accuracy = train(cluster, steps=given.steps)
    if cluster.elect("evaluation"):
        print(f"accuracy {accuracy:.4f}", flush=True)
        cluster.report("accuracy", accuracy)
    cluster.close()


if __name__ == "__main__":
    main()
'''

_TEST = '''"""The same training in one process, and on a cluster inside the process of the test."""

from contextlib import closing

import dflow
import dflow.testing
from $name import train


def test_training_in_one_process() -> None:
    with closing(dflow.connect()) as cluster:
        assert train(cluster, steps=200) > 0.9


def test_training_on_a_cluster() -> None:
    with dflow.testing.memory_cluster(ps=1) as memory, closing(memory.worker()) as cluster:
        assert train(cluster, steps=200) > 0.9
'''

_README = """# $name

In the environment that has dflow:

    pip install -e '.[test]'
    pytest                                      # trains in one process, and on a cluster inside it
    python $name.py                             # one process
    dflow launch --ps 1 --workers 2 $name.py    # a parameter task and two workers, each a process

`$name.py` has the data, the model and the step; put your own there. `dflow doctor` checks this machine, and
`dflow launch --help` lists what a launch can do.
"""

_PYPROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$name"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["dflow>=$version", "jax", "numpy", "optax"]

[project.optional-dependencies]
test = ["pytest"]

[tool.setuptools]
py-modules = ["$name"]
"""

_IGNORED = """__pycache__/
.venv/
*.egg-info/
.pytest_cache/
"""


def new_project(name: str, parent: Path) -> str:
    """Write the project `name` into a new folder of `parent`; return a message for the user.

    raises  ConfigError if `name` is no module name, is the name of an installed module, or its folder exists
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_").lower()
        near = near if re.fullmatch(r"[a-z_][a-z0-9_]*", near) and not keyword.iskeyword(near) else "my_project"
        raise ConfigError(
            f"project name: expected the name of a Python module in lower case, got {name!r}",
            f"choose another name, such as {near}",
        )
    folder = parent / name
    if folder.exists():
        raise ConfigError(
            f"project folder: expected a new one, but {folder} exists", "choose another name, or remove it"
        )
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"project name: expected one that no installed module has, got {name!r}",
            f"choose another name, such as my_{name}",
        )
    folder.mkdir()
    for file, text in _project_files(name, __version__).items():
        (folder / file).write_text(text)
    next_commands = {
        f"cd {name}": "",
        f"python {name}.py": "  # one process",
        f"dflow launch --ps 1 --workers 2 {name}.py": "  # a parameter task and two workers",
        "pytest": "  # its tests, on one process and on a cluster",
    }
    width = max(map(len, next_commands))
    lines = [f"  {command:{width}}{comment}".rstrip() for command, comment in next_commands.items()]
    return "\n".join([f"wrote {folder}: a script that trains, its tests, and a README", *lines])


def _project_files(name: str, version: str) -> dict[str, str]:
    """Return the text of each file of the project `name` by its file name; it asks for dflow `version` or newer."""
    files = {
        f"{name}.py": _SCRIPT,
        f"test_{name}.py": _TEST,
        "README.md": _README,
        "pyproject.toml": _PYPROJECT,
        ".gitignore": _IGNORED,
    }
    return {file: Template(text).substitute(name=name, version=version) for file, text in files.items()}


NEW = Command(
    "new",
    "write a small project to start from",
    lambda parser: parser.add_argument(
        "name", metavar="NAME", help="the name of the folder and of the Python module in it"
    ),
    lambda options: print(new_project(options.name, Path())),
    more=", in a new folder: a script that trains in one process and on a cluster, its tests, a README.",
)
