"""`dflow.wire`: the codec of values that are sent from task to task."""

from __future__ import annotations

from typing import Any

import jax

from dflow.tracing.errors import GraphTypeError
from dflow.tracing.ir.wire_codecs import CODECS
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.primitives.state_primitives import wire_p
from dflow.tracing.state.initial_value import given_array
from dflow.tracing.state.resources import is_variable


def wire(tree: Any, codec: str, *, gradient: str | None = None) -> Any:
    """The same pytree, whose floating arrays are made smaller by `codec` where they go from one task to another.

    tree      arrays, numbers, and variables, which are read
    codec     `bfloat16` (2 bytes an element, error at most 1/256 of it); `float8_e4m3fn` (1 byte, 1/16 of it, down to
              1/28,672 of the largest), `float8_e5m2` (1 byte, 1/8, down to a billionth of the largest) or `int8` (1
              byte, 1/254 of the largest), each with a scale for the whole array; or `none`
    gradient  the codec of their gradient on its way back; the default is `codec`

    A value that stays on its task is not changed by it, nor are integers, booleans and complex numbers anywhere. Of
    several codecs on one value the last counts. Infinities arrive as NaN by `float8_e4m3fn` and `int8`.

    raises  GraphTypeError for an unknown codec, and for a leaf that is not an array
    """
    for said in (codec, gradient):
        if said is not None:
            check_codec("wire", said)
    back = codec if gradient is None else gradient

    def wired(leaf: Any) -> Any:
        value = leaf.read() if is_variable(leaf) else given_array(leaf, _no_array)
        return wire_p.bind(value, codec=codec, gradient=back)

    return jax.tree_util.tree_map(wired, tree, is_leaf=is_variable)


def check_codec(what: str, codec: object) -> None:
    """Raise GraphTypeError for a codec that is none; `what` was given it."""
    if codec not in CODECS:
        raise GraphTypeError(
            f"{what} was given the codec {codec!r}",
            did_you_mean(str(codec), CODECS, f"the codecs are {', '.join(CODECS)}"),
        )


def _no_array(what: str) -> GraphTypeError:
    return GraphTypeError(f"wire was given {what}", "give it arrays, numbers and variables")
