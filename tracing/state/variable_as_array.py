"""Variables as arrays: leaves of pytrees that JAX reads, with the operators and attributes of their values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import array_attributes, register_leaf, register_missing
from dflow.tracing.number_range import check_number
from dflow.tracing.source import as_code, at, caller
from dflow.tracing.state.operand_notes import note_operands

#: The operators that have a reflected and an in-place form, with their symbols.
_SYMBOLS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "matmul": "@",
    "and": "&",
    "or": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}
_OTHER_OPERATORS = ("lt", "le", "gt", "ge", "neg", "pos", "abs", "invert")
#: Special methods of arrays that the class `jax.Array` does not declare.
_UNDECLARED = ("__dlpack__", "__dlpack_device__")
#: Attributes of arrays that a variable does not have, since steps replace its buffer: what to write instead.
OF_BUFFERS = {
    "delete": "; to free it, delete the variable, or call dflow.reset_container",
    "device_buffer": "; write {0}.read().addressable_data(0)",
    "device_buffers": "; write [shard.data for shard in {0}.read().addressable_shards]",
    "is_ready": "; take the value, value = {0}.read(), and ask value.is_ready()",
    "unsafe_buffer_pointer": "; keep the value, value = {0}.read(), as long as its pointer is in use",
}
#: Python's conversions, which raise TypeError for a value that has none, such as a key.
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "iter": iter,
}


def register_as_array(cls: type[Any]) -> None:
    """Make JAX use a variable as its value: give the class the operators and methods of arrays, and register it.

    The class must have `aval` and `read`.
    """
    for word in (*_SYMBOLS, *_OTHER_OPERATORS):
        setattr(cls, f"__{word}__", _operator(getattr(operator, f"__{word}__")))
    for word in ("eq", "ne"):
        setattr(cls, f"__{word}__", _comparison(getattr(operator, word)))
    for word in _SYMBOLS:
        setattr(cls, f"__r{word}__", _operator(getattr(operator, f"__{word}__"), is_reflected=True))
        setattr(cls, f"__i{word}__", _refused_in_place(word))
    for word, convert in _CONVERSIONS.items():
        setattr(cls, f"__{word}__", _converted(convert))
    own = set(dir(object)) | vars(cls).keys() | {"__slots__", "__weakref__"}
    for name in {*dir(jax.Array), *array_attributes(), *_UNDECLARED} - own - OF_BUFFERS.keys():
        setattr(cls, name, _of_value(name))
    register_leaf(cls)
    of_variables = [name for name in vars(cls) if name.startswith(("assign", "gather", "scatter_"))]
    register_missing(["read", *of_variables], _refuse_on_array)


def _converted(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda variable: convert(variable.read())


def _operator(function: Callable[..., Any], is_reflected: bool = False) -> Callable[..., Any]:
    order = slice(None, None, -1 if is_reflected else 1)

    def applied(variable: Any, *others: Any) -> Any:
        try:
            return function(*(variable.read(), *map(_operand, others))[order])
        except (TypeError, ValueError) as error:
            note_operands(error, (variable, _operand(others[0]))[order] if others else None)
            raise

    return applied


def _operand(value: Any) -> Any:
    check_number(value, "an operand of a variable")
    return jnp.asarray(value)


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    """`==` or `!=` by value; with None, a string and so on as an array's."""

    def compared(variable: Any, other: Any) -> Any:
        check_number(other, "an operand of a variable")
        return function(variable.read(), other.read() if isinstance(other, type(variable)) else other)

    return compared


def _refused_in_place(word: str) -> Callable[..., Any]:
    update = f"assign_{word}" if word in ("add", "sub", "mul") else ""

    def refused(variable: Any, other: Any) -> NoReturn:
        name = as_code(variable.name)
        raise VariableError(
            f"variable {variable.name!r} is updated by an in-place {word}, which would put an array in the variable's "
            "place",
            f"write {name}.{update}(...)" if update else f"write {name}.assign({name} {_SYMBOLS[word]} ...)",
        )

    return refused


def _of_value(name: str) -> property:
    return property(lambda self: getattr(self.read(), name), doc=f"`{name}` of the value, as an array has it.")


def _refuse_on_array(name: str, array: Any) -> NoReturn:
    close_over = f"have the function close over the variable, and write w.{name}(...)"
    raise AttributeError(
        f"a traced {array_type_of(array)} has no attribute {name!r}: a variable that is passed to a function of JAX's, "
        f"such as jax.grad, jax.lax.scan or jax.jit, is an array there{at(caller())}\n"
        f"  {'use it as it is' if name == 'read' else close_over}; functions of dflow.jit get the variable itself",
        name=name,
        obj=array,
    )
