"""The functions that `grad` and `value_and_grad` return. Using one like its result raises an error with the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, NoReturn

import jax

from dflow.tracing.errors import DflowError, GraphTypeError
from dflow.tracing.jax_frontend import hides_frames, register_refused
from dflow.tracing.number_range import check_numbers, is_wide
from dflow.tracing.path_names import leaf_names
from dflow.tracing.primitives.id_checks import awaits_checks
from dflow.tracing.source import at, caller


class Derivative:
    """The function that `grad` and the like return: it differentiates `fun`, and takes the same arguments.

    Using it like a result, in arithmetic, indexing or unpacking, raises GraphTypeError.
    """

    def __init__(self, title: str, fun: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self._title, self._call = title, call

    @hides_frames
    @awaits_checks
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        if any(map(is_wide, leaves)):
            names = leaf_names(f"{self._title}: argument", args) + leaf_names(f"{self._title}: keyword", kwargs)
            # A number of Python stays one in the function.
            check_numbers([None if isinstance(leaf, int) else leaf for leaf in leaves], lambda: names)
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> NoReturn:
        title = self.__dict__.get("_title", "grad")
        raise AttributeError(f"dflow.{title} returns a function, which has no {name!r}{at(caller())}\n{_remedy(title)}")

    def __repr__(self) -> str:
        return f"<dflow.{self._title} of {getattr(self, '__name__', 'a function')}>"

    def refuse(self, use: str, error: type[DflowError] = GraphTypeError) -> NoReturn:
        """Raise an error which says that the function was used, as `use` names, but not called."""
        raise error(
            f"dflow.{self._title} returns a function, and {use} needs what that returns{at(caller())}\n"
            f"{_remedy(self._title)}"
        )


def _remedy(title: str) -> str:
    return f"  call it: dflow.{title}(loss, variables)(), with the arguments of the loss in the parentheses"


def refuse_uncalled(use: str, value: Any) -> None:
    """Raise GraphTypeError if `value` is the function returned by `grad` and the like, which was not called."""
    if isinstance(value, Derivative):
        value.refuse(use)


_ON_ARRAYS = "an operation on arrays"
_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_USES = {
    **dict.fromkeys(("__jax_array__", "__array__"), _ON_ARRAYS),
    **dict.fromkeys(("__float__", "__int__"), "a conversion"),
    **dict.fromkeys(("__lt__", "__le__", "__gt__", "__ge__"), "a comparison"),
    **dict.fromkeys(("__neg__", "__abs__"), "arithmetic"),
    **dict.fromkeys((f"__{side}{name}__" for name in _BINARY for side in ("", "r")), "arithmetic"),
    "__iter__": "unpacking",
    "__getitem__": "indexing",
}
for _name, _use in _USES.items():
    setattr(Derivative, _name, lambda self, *_, use=_use: self.refuse(use))
# JAX catches every TypeError here, and says something else.
register_refused(Derivative, lambda derivative: derivative.refuse(_ON_ARRAYS, DflowError))
