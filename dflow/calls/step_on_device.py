"""Single-executable steps with a fixed device: arguments on other devices are copied to it.

The variables that the step was placed beside make JAX run it on their device. But JAX refuses arguments that are
committed to another device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from dflow.calls.single_executable import LoweredWhole, WholeStep
from dflow.lowering.local import PureStep
from dflow.lowering.state.store import Store
from dflow.lowering.values.devices import device_named
from dflow.tracing.jax_frontend import forget_failed_dispatch, is_resource


class StepOnDevice(WholeStep):
    """A `WholeStep` with a fixed device."""

    def __init__(self, store: Store, step: PureStep, function: Any, compiler_options: dict[str, Any] | None) -> None:
        super().__init__(store, step, function, compiler_options)
        self._device = device_named(step.device)
        self._devices = {self._device}
        self._constants = tuple(map(self._here, self._constants))
        #: Whether an argument was once on another device, so that calls now check each argument.
        self._looks = False

    def __call__(self, args: Any, kwargs: Any) -> Any:
        """Run the step for these arguments. Raises NotEntered if none was entered for their types."""
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
        """Compile the step for the types of these arguments, and run it."""
        return super().enter(step, out_tree, *self._brought(args, kwargs))

    def lower(self, step: PureStep, out_tree: Any, args: Any, kwargs: Any) -> LoweredWhole:
        """Return the program that calls with arguments of these types run, lowered."""
        return super().lower(step, out_tree, *self._brought(args, kwargs))

    def run_compiled(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call`, a compiled program of this step. `args` and `kwargs` must not contain the static arguments."""
        return super().run_compiled(call, *self._brought(args, kwargs))

    def _brought(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._argument, args)), {name: self._argument(value) for name, value in kwargs.items()}

    def _argument(self, argument: Any) -> Any:
        """Return an argument with its arrays on the device; the same object if they are, as it may be static."""
        leaves, tree = jax.tree_util.tree_flatten(argument)
        here = [self._here(leaf) for leaf in leaves]
        is_same = all(one is other for one, other in zip(leaves, here, strict=True))
        return argument if is_same else jax.tree_util.tree_unflatten(tree, here)

    def _here(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_resource(leaf):
            return leaf
        is_elsewhere = leaf.committed and leaf.sharding.device_set != self._devices
        return jax.device_put(leaf, self._device) if is_elsewhere else leaf
