"""TensorBoard's own pages in a browser: curves and the graph of a step are drawn.

Skipped without TensorBoard, Playwright or Chromium. With `TENSORBOARD_PAGES=docs/images` before the command the pages
are kept as pictures, which are those of docs/loggers.md.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async
from dflow.loggers import TensorBoard
from dflow.testing import memory_cluster
from tests.distributed.waiting import DEADLINE_S, until

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")

pytestmark = pytest.mark.once


def train(folder: Path, rate: float) -> None:
    """Train a model on a cluster of two parameter tasks, by a plain loop."""
    with memory_cluster(ps=2) as memory, closing(memory.worker()) as cluster:
        with cluster.parameter_servers():
            kernel = dflow.Variable(lambda: jax.random.normal(jax.random.key(0), (8, 16)) * 0.3, name="hidden/kernel")
            bias = dflow.Variable(lambda: jnp.zeros(16), name="hidden/bias")
            output = dflow.Variable(lambda: jnp.full(16, 0.1), name="output/kernel")
            adam = dflow.Optimizer(optax.adam(rate), [kernel, bias, output], name="adam")

        def loss(x: Any, y: Any) -> Any:
            with jax.named_scope("hidden"):
                hidden = jax.nn.relu(x @ kernel + bias)
            with jax.named_scope("output"):
                predicted = hidden @ output
            with jax.named_scope("loss"):
                return jnp.mean((predicted - y) ** 2)

        @dflow.jit
        def step(x: Any, y: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: loss(x, y), [kernel, bias, output])()
            adam.apply(gradients)
            return {"loss": value}

        x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
        batch = x, x @ np.arange(8, dtype=np.float32)
        with TensorBoard(folder, cluster=cluster) as board:
            board.graph(dflow.graph(step, *batch))
            for number, metrics in enumerate(Async(cluster).run(step, lambda number: batch, steps=60)):
                board.log(number, metrics)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of TensorBoard with two runs."""
    train(tmp_path / "runs" / "slow", 0.02)
    train(tmp_path / "runs" / "fast", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL) as running:
        try:
            until(lambda: b'"loss"' in answer(f"http://127.0.0.1:{port}/data/plugin/scalars/tags"))
            yield f"http://127.0.0.1:{port}"
        finally:
            running.kill()


def answer(address: str) -> bytes:
    """What the server answers; nothing before it does."""
    try:
        with urlopen(address, timeout=DEADLINE_S) as response:
            return bytes(response.read())
    except URLError:
        return b""


def test_the_pages_of_curves_and_of_the_graph(browser: Any, server: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(1000 * DEADLINE_S)
    page.goto(f"{server}/#scalars")
    page.locator("text=tag: loss").wait_for()
    page.locator("vz-line-chart2 g.plot path, vz-line-chart2 path.line").first.wait_for(state="attached")
    keep(page, "scalars")
    page.goto(f"{server}/#graphs")
    for name in ("hidden", "output", "loss", "gradients", "apply_adam"):
        page.locator(f"g.node[data-name='{name}']").wait_for()
    page.locator("g.edge[data-edge='hidden--apply_adam']").wait_for(state="attached")
    page.locator("g.node[data-name='gradients']").hover(trial=True)  # until the layout has stopped moving
    keep(page, "graph")
    page.close()


def keep(page: Any, name: str) -> None:
    """Keep the page as a picture if there is a folder for it."""
    if folder := os.environ.get("TENSORBOARD_PAGES"):
        page.screenshot(path=f"{folder}/tensorboard-{name}.png", clip={"x": 0, "y": 0, "width": 960, "height": 640})
