"""A step that is one XLA call on a device that it names: arguments that lie elsewhere are brought there.

The step runs where the variables lie that it was placed beside, so JAX needs no telling; what it refuses are arguments
that were put on another device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dflow.lowering.devices import device_named
from dflow.lowering.local import PureStep
from dflow.lowering.store import Store
from dflow.tracing.jax_frontend import forget_failed_dispatch, is_resource
from dflow.whole_step import LoweredWhole, WholeStep


class StepOnDevice(WholeStep):
    """As `WholeStep`, for a step with a device."""

    def __init__(self, store: Store, step: PureStep, function: Any, compiler_options: dict[str, Any] | None) -> None:
        super().__init__(store, step, function, compiler_options)
        self._device = device_named(step.device)
        self._devices = {self._device}
        self._constants = tuple(map(self._here, self._constants))
        #: Whether an argument lay elsewhere once, so that each is looked at.
        self._looks = False

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Run the step of these arguments. Raises NotEntered when it is none that was entered."""
        if self._looks:
            return super().__call__(*self._brought(args, kwargs))
        try:
            return super().__call__(args, kwargs)
        except ValueError:
            leaves = jax.tree_util.tree_leaves((args, kwargs))
            if all(self._here(leaf) is leaf for leaf in leaves):
                raise
        self._looks = True
        forget_failed_dispatch(self.jitted)
        return super().__call__(*self._brought(args, kwargs))

    def enter(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> Any:
        """Compile the step of the types of these arguments, and run it."""
        return super().enter(step, out_tree, *self._brought(args, kwargs))

    def lower(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> LoweredWhole:
        """The program of the step of the types of these arguments, which calls have too."""
        return super().lower(step, out_tree, *self._brought(args, kwargs))

    def run_compiled(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a program of this step, without the static ones of its arguments."""
        return super().run_compiled(call, *self._brought(args, kwargs))

    def _brought(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._argument, args)), {name: self._argument(value) for name, value in kwargs.items()}

    def _argument(self, argument: Any) -> Any:
        """An argument with its arrays on the device; itself when they are, for it may be a static one."""
        leaves, tree = jax.tree_util.tree_flatten(argument)
        here = [self._here(leaf) for leaf in leaves]
        is_same = all(one is other for one, other in zip(leaves, here, strict=True))
        return argument if is_same else jax.tree_util.tree_unflatten(tree, here)

    def _here(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_resource(leaf):
            return leaf
        is_elsewhere = leaf.committed and leaf.sharding.device_set != self._devices
        return jax.device_put(leaf, self._device) if is_elsewhere else leaf
