"""Metrics, histograms, text, images, graphs, hyperparameters and profiles in a folder that TensorBoard shows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflow.distributed.cluster.cluster import Cluster
from dflow.graphs.graph_view import GraphView
from dflow.loggers.event_file import EventFile
from dflow.loggers.graph_def import graph_def
from dflow.loggers.logger import Logger, fixed, plain_hyperparameters
from dflow.tracing.errors import TrainingError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.path_names import path_name
from dflow.tracing.state.resources import Variable, is_variable

#: Number of buckets of a histogram, as TensorFlow's.
_BUCKETS = 30


class TensorBoard(Logger):
    """Writes metrics and more into a folder that `tensorboard --logdir` shows.

    folder           of one run. A program that is started again goes on in it: what an earlier program has written of
                     its first step and of later ones is no longer shown
    cluster          the result of `dflow.connect()`, for a loop by hand on a cluster; a trainer gives its own
    all_workers      whether each worker writes, into `<folder>/worker-0`, `<folder>/worker-1` and so on; by default the
                     first worker alone, into `folder`
    every            in a trainer: number of steps between the steps whose results are written, instead of means about
                     once a second
    histogram_every  number of steps between histograms of `variables`, and of the arrays in the results of a step,
                     such as gradients
    variables        variables, in any pytree
    hyperparameters  numbers, texts and booleans by name, for the tab HPARAMS; other values are written as text
    profile          two numbers of steps: JAX's profiler runs from the end of the first step to the end of the second

    Raises TrainingError for other settings and for a folder that cannot be written, ConfigError without tensorboardX.
    """

    @suggests_keywords
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        cluster: Cluster | None = None,
        all_workers: bool = False,
        every: int | None = None,
        histogram_every: int | None = None,
        variables: Any = (),
        hyperparameters: Mapping[str, Any] | None = None,
        profile: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(os.fspath(folder), cluster, all_workers, every)
        self._required("tensorboardX", "'dflow[tensorboard]'")
        self._given = Path(folder)
        self._check_period("histogram_every", histogram_every)
        self._histogram_every, self._histogram_step = histogram_every, 0
        leaves = jax.tree_util.tree_leaves(variables, is_leaf=is_variable)
        self._variables: list[Variable] = [leaf for leaf in leaves if is_variable(leaf)]
        if len(self._variables) < len(leaves) or (leaves and histogram_every is None):
            raise TrainingError(
                f"{self._name}: expected variables together with histogram_every, got {variables!r} and "
                f"{histogram_every}",
                "give variables=[w, b], histogram_every=1000",
            )
        self._hyperparameters = plain_hyperparameters(self._name, hyperparameters)
        if profile is not None and not 0 <= profile[0] < profile[1]:
            raise TrainingError(
                f"{self._name}: profile: expected two numbers of steps, the smaller first, got {profile}",
                "give profile=(100, 105)",
            )
        self._profile, self._is_profiling = profile, False
        self._file: EventFile | None = None
        #: Whether the values of earlier programs are discarded.
        self._has_discarded = False

    def log(self, step: int, values: Any) -> None:
        """Write the values of a step, as every logger does, and histograms and the profile if it is time for them.

        With `histogram_every`, arrays among the values are histograms.
        """
        super().log(step, values)
        self._after_step(step, values)

    def on_step(self, steps: int, outcome: Any) -> None:
        """Write the step, its histograms and the profile, if it is time for them."""
        super().on_step(steps, outcome)
        self._after_step(steps, outcome)

    def on_end(self, steps: int, reason: str) -> None:
        """End a profile, and wait until all is written."""
        self._end_profile()
        super().on_end(steps, reason)

    def histogram(self, step: int, name: str, values: Any) -> None:
        """Write a histogram of an array of real numbers, which need not be computed yet. It has 30 buckets.

        Values that are not finite have no bucket; their number is the scalar `<name>/not_finite`.
        """
        self._put(step, self._write_histogram, name, fixed(values))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        self._put(step, self._add, EventFile.text, name, text)

    def image(self, step: int, name: str, image: Any) -> None:
        """Write an image: an array of shape [height, width] or [height, width, 1, 3 or 4].

        Bytes are from 0 to 255, floats from 0 to 1.
        """
        shape = tuple(getattr(image, "shape", ()))
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
            self._warn_once(
                f"image {name}", f"image {name!r}: expected the shape [height, width, channels], got {[*shape]}"
            )
        else:
            self._put(step, self._add, EventFile.image, name, fixed(image))

    def graph(self, graph: GraphView) -> None:
        """Write a graph, `dflow.graph(step, *batch)`, for the tab GRAPHS, which shows one for each run."""
        if not isinstance(graph, GraphView):
            raise TrainingError(
                f"{self._name}: graph: expected a dflow.GraphView, got {graph!r}", "give dflow.graph(step, *batch)"
            )
        if not self._is_silent:
            self._put(0, self._add, EventFile.graph, graph_def(graph.graph))

    @property
    def _folder(self) -> Path:
        return self._given / self._task

    def _open(self) -> None:
        self._file = EventFile(self._folder, goes_on=self._has_discarded)
        if self._hyperparameters:
            self._file.session(self._hyperparameters)

    def _discard(self, first: int) -> None:
        self._has_discarded = True
        self._opened_file.discard(first)

    @property
    def _opened_file(self) -> EventFile:
        assert self._file is not None
        return self._file

    def _write(self, step: int, time_s: float, numbers: Mapping[str, float]) -> None:
        self._opened_file.scalars(step, time_s, numbers)

    def _write_histogram(self, step: int, time_s: float, name: str, values: Any) -> None:
        try:
            array = np.asarray(values).astype(np.float64).reshape(-1)
        except Exception as error:
            self._warn_once(name, f"histogram {name!r} could not be made: {error}")
            return
        finite = array[np.isfinite(array)]
        if finite.size < array.size:
            self._opened_file.scalars(step, time_s, {f"{name}/not_finite": float(array.size - finite.size)})
        if finite.size:
            self._opened_file.histogram(step, time_s, name, finite, _BUCKETS)

    def _add(self, step: int, time_s: float, write: Callable[..., None], *what: Any) -> None:
        write(self._opened_file, step, time_s, *what)

    def _sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def _shut(self, failed: bool) -> None:
        self._end_profile()
        if self._file is not None and self._hyperparameters:
            self._file.session_end(failed)
        self._abandon()

    def _abandon(self) -> None:
        self._is_open = False
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _leave_out(self, name: str, value: Any, by_hand: bool) -> None:
        if self._histogram_every is None or not any(True for _ in _arrays(name, value)):
            super()._leave_out(name, value, by_hand)

    def _after_step(self, step: int, values: Any) -> None:
        if self._is_silent:
            return
        every = self._histogram_every
        if every is not None and (step // every != self._histogram_step // every or step == 0):
            for variable in self._variables:
                self.histogram(step, variable.name, variable)
            for name, array in _arrays("", values):
                self.histogram(step, name, array)
        self._histogram_step = step
        if self._profile is not None:
            self._follow_profile(step, values)

    def _follow_profile(self, step: int, values: Any) -> None:
        assert self._profile is not None
        first, last = self._profile
        if self._is_profiling and step >= last:
            jax.block_until_ready(values)  # else the profile would lack what the last steps compute
            self._end_profile()
        elif not self._is_profiling and first <= step < last:
            try:
                jax.profiler.start_trace(self._folder)
                self._is_profiling = True
            except Exception as error:  # another profile runs
                self._profile = None
                self._warn_once("profile", f"the profile could not be started: {error}")

    def _end_profile(self) -> None:
        if self._is_profiling:
            self._is_profiling, self._profile = False, None
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                self._warn_once("profile", f"the profile could not be written: {error}")


def _arrays(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in a value that have axes, with their names."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(values, is_leaf=is_variable)[0]:
        if getattr(leaf, "shape", ()):
            yield "/".join(filter(None, (name, path_name(path)))) or "loss", leaf
