"""A Keras optimizer as an optax transformation, so that `dflow.Optimizer` runs it where the variables live.

Its state has the values of the optimizer's own variables: those of a model's variable, such as its momentum, under
`<kind>/<path of the variable>`, which is how `dflow.Optimizer` finds the variable that they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax


def transformation(optimizer: Any, trained: Sequence[Any]) -> optax.GradientTransformation:
    """Return a built Keras optimizer of the variables `trained` as a transformation of dicts by their paths."""
    paths = [variable.path for variable in trained]
    recorder = _recorder(optimizer)
    treedef = jax.tree_util.tree_structure(state_of(optimizer, trained, lambda slot: slot))
    # The order of the slots in the state, as numbers in the order of the optimizer.
    positions = jax.tree_util.tree_leaves(state_of(optimizer, trained, [*map(id, optimizer.variables)].index, key=id))

    def init(params: Any) -> Any:
        del params
        return state_of(optimizer, trained, _initial)

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        slots: list[Any] = [None] * len(positions)
        for position, value in zip(positions, jax.tree_util.tree_leaves(state), strict=True):
            slots[position] = value
        given = [params[path] for path in paths]
        values, slots = recorder.stateless_apply(slots, [gradients[path] for path in paths], given)
        updates = {
            variable.path: recorder.delta(variable, before, after)
            for variable, before, after in zip(trained, given, values, strict=True)
        }
        recorder.deltas.clear()  # they would outlive their trace
        return updates, jax.tree_util.tree_unflatten(treedef, [slots[position] for position in positions])

    return optax.GradientTransformation(init, update)


def state_of(
    optimizer: Any, trained: Sequence[Any], of: Callable[[Any], Any], key: Callable[[Any], Any] = lambda slot: slot
) -> dict[str, Any]:
    """Return `of(slot)` for each variable of a Keras optimizer, in the structure of the transformation's state."""
    state: dict[str, Any] = {}
    # Keras names a slot `<path of the variable, joined by _>_<kind>`.
    begins = sorted(((f"{one.path.replace('/', '_')}_", one.path) for one in trained), key=lambda pair: -len(pair[0]))
    for position, slot in enumerate(optimizer.variables):
        path = next((path for begin, path in begins if slot.name.startswith(begin)), None)
        name = slot.name if path is None else slot.name[len(path) + 1 :]
        inside, at = (state, name) if path is None else (state.setdefault(name, {}), path)
        # Optimizers such as Adafactor give several slots one name.
        inside[f"{at}_{position}" if at in inside else at] = of(key(slot))
    return state


def _initial(slot: Any) -> Any:
    """The value of a slot; one number everywhere, as at first, is made where the slot lives and not sent."""
    value = np.asarray(slot.value)
    is_even = value.size > 0 and bool((value == value.flat[0]).all())
    return jnp.full(value.shape, value.flat[0], value.dtype) if is_even else jnp.asarray(value)


class _Recorder:
    """Part of a class of optimizers that notes what is added to each variable.

    Why: `after - before` of a table would read and write all of its rows, and the addend only those of the gradient.
    """

    deltas: dict[int, tuple[Any, Any, Any]]

    def delta(self, variable: Any, before: Any, after: Any) -> Any:
        """Return the difference of `after` and `before`: the addend, if nothing else changed the variable."""
        start, addend, end = self.deltas.get(id(variable), (None, None, None))
        return addend if start is before and end is after else after - before

    def assign_add(self, variable: Any, value: Any) -> None:
        self._note(variable, value, super().assign_add)  # type: ignore[misc]

    def assign_sub(self, variable: Any, value: Any) -> None:
        self._note(variable, value, super().assign_sub, -1)  # type: ignore[misc]

    def _note(self, variable: Any, value: Any, change: Callable[[Any, Any], None], sign: int = 1) -> None:
        before, value = variable.value, keras.ops.convert_to_tensor(value)
        change(variable, value)
        self.deltas[id(variable)] = before, value if sign == 1 else -value, variable.value


def _recorder(optimizer: Any) -> Any:
    """Return a copy of an optimizer with the same variables that notes its updates; the user's own stays as it is."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Recorder, kind), {}))
    made.__dict__.update(optimizer.__dict__, deltas={})
    return made
