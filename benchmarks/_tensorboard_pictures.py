"""Take the pictures of TensorBoard's pages for docs/loggers.md: the curves of two runs, and the graph of a step.

    python -m benchmarks._tensorboard_pictures docs/images

Trains on a cluster in this process. Needs Chromium, and the extras `tensorboard` and `integrations`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from playwright.sync_api import Page, sync_playwright

import dflow
from benchmarks._dashboard_pictures import DEADLINE_MS, OPTIONS, shot
from dflow.distributed import Async
from dflow.loggers import TensorBoard
from dflow.testing import memory_cluster


def train(folder: Path, rate: float) -> None:
    """Train a small model on two parameter tasks, and log its curve and the graph of its step."""
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


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Start TensorBoard on the runs in `folder`; yield its address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "runs", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"at (http://\S+?)/? ", line):
                    yield found[1]
                    break
        finally:
            process.kill()


def pages(page: Page, address: str, folder: Path) -> None:
    """Take the pictures."""
    page.set_default_timeout(DEADLINE_MS)
    page.goto(f"{address}/#scalars")
    page.locator("text=tag: loss").wait_for()
    page.locator("vz-line-chart2 g.plot path, vz-line-chart2 path.line").first.wait_for(state="attached")
    shot(page, folder / "tensorboard-scalars.png")
    page.goto(f"{address}/#graphs")
    page.locator("g.edge[data-edge='hidden--apply_adam']").wait_for(state="attached")
    page.locator("g.node[data-name='gradients']").hover(trial=True)  # until the layout has stopped moving
    shot(page, folder / "tensorboard-graph.png")


def main() -> None:
    """Write the pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary, "runs", "slow"), 0.02)
        train(Path(temporary, "runs", "fast"), 0.1)
        browser = driver.chromium.launch(executable_path=chromium, args=OPTIONS)
        with served(Path(temporary)) as address:
            pages(browser.new_page(viewport={"width": 1280, "height": 800}), address, folder)
        browser.close()


if __name__ == "__main__":
    main()
