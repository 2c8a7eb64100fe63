"""The tensors of an exported function: its inputs and outputs as the Open Inference Protocol names them.

An input is named by its parameter, and inside a pytree by the expression that selects it: `batch['ids']`. The outputs
of a function that returns a dict are named by its keys, those of others `result`, `result[0]`, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.exporting.export_manifest import FunctionSignature, arguments_of
from dflow.lowering.programs.portable_tree import Dict, build, flatten, is_ids, leaves_of, parts_of, parts_of_type
from dflow.serving.request_members import RefusedRequest
from dflow.serving.tensors import datatype_of
from dflow.tracing.argument_ids import ids_of
from dflow.tracing.errors import ExportError, InputError
from dflow.tracing.ir.types import DTYPES

#: Dtypes of ids in requests, by the names of their types.
_IDS: Mapping[str, np.dtype[Any]] = {"str": np.dtype(object), "id64": np.dtype(np.int64)}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, dtype and dimensions; a dimension is a number, or text such as `b` for any size."""

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | str, ...]

    @property
    def metadata(self) -> dict[str, Any]:
        shape = [dim if isinstance(dim, int) else -1 for dim in self.dims]
        return {"name": self.name, "datatype": datatype_of(self.dtype), "shape": shape}

    def refusal(self, array: np.ndarray[Any, Any]) -> str | None:
        """Return why an array is not of this type, or None."""
        fits = len(array.shape) == len(self.dims) and all(
            size == dim for dim, size in zip(self.dims, array.shape, strict=True) if isinstance(dim, int)
        )
        if fits and array.dtype == self.dtype:
            return None
        return f"input {self.name!r}: expected {self}, got {datatype_of(array.dtype)}{list(array.shape)}"

    def __str__(self) -> str:
        return f"{datatype_of(self.dtype)}[{','.join(map(str, self.dims))}]"


class SignatureTensors:
    """Inputs and outputs of a function.

    precision  makes the context of a call
    batch      the letter of the leading dimension that all inputs and outputs share; None if there is none, or if
               another dimension is of no fixed size, so that rows of several requests have no one shape
    raises     ExportError for a tensor of a dtype that the protocol lacks
    """

    def __init__(
        self,
        name: str,
        signature: FunctionSignature,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.name, self._signature, self._precision = name, signature, precision
        self._arguments = arguments_of(signature.parameters)
        inputs = [leaf for one in signature.parameters for leaf in leaves_of(one.tree, one.name)]
        by_name = {one.name: leaves_of(one.tree, one.name) for one in signature.parameters}
        #: Names in the order of the leaves of `arguments_of`.
        positional = [one.name for one in signature.parameters if one.by != "name"]
        named = [one.name for one in signature.parameters if one.by == "name"]
        self._order = [path for one in (*positional, *named) for path, _ in by_name[one]]
        self._ids = {path for path, type in inputs if is_ids(type)}
        self.inputs = [_spec(name, path, type) for path, type in inputs]
        self.outputs = [_spec(name, path, type) for path, type in _outputs(signature)]
        self.batch = self._batch_letter()
        #: Then the outputs have no rows either, and no other effect: no program needs to run.
        self._takes_no_rows = self.batch is not None and not signature.writes

    def _batch_letter(self) -> str | None:
        every = [*self.inputs, *self.outputs]
        first = {spec.dims[0] if spec.dims else 0 for spec in every}
        letter = next(iter(first), 0)
        rest = [dim for spec in every for dim in spec.dims[1:]]
        has_one = self.inputs and len(first) == 1 and isinstance(letter, str) and letter.isidentifier()
        return str(letter) if has_one and all(isinstance(dim, int) for dim in rest) else None

    def check(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Raise RefusedRequest, which names the input, unless the arrays are those of a call."""
        due = [spec.name for spec in self.inputs]
        if set(due) != set(arrays):
            raise RefusedRequest(
                400, f"{self.name}: expected the inputs {', '.join(due) or 'none'}, got {', '.join(arrays) or 'none'}"
            )
        sizes: dict[str, tuple[str, int]] = {}
        for spec in self.inputs:
            array = arrays[spec.name]
            if refusal := spec.refusal(array):
                raise RefusedRequest(400, refusal)
            for dim, size in zip(spec.dims, array.shape, strict=True):
                if isinstance(dim, str) and (known := sizes.setdefault(dim, (spec.name, size)))[1] != size:
                    raise RefusedRequest(
                        400, f"input {spec.name!r}: expected {known[1]} for {dim}, as {known[0]!r} has, got {size}"
                    )

    def of_no_rows(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]] | None:
        """Return the outputs for checked inputs without rows; None for others."""
        if not self._takes_no_rows or next(iter(arrays.values())).shape[0]:
            return None
        return [np.zeros((0, *spec.dims[1:]), spec.dtype) for spec in self.outputs]

    def refusal_of(self, error: InputError, arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Return why a call was refused, with the inputs that have the id of the error."""
        fact = str(error).partition("\n")[0]
        having = [name for name, array in arrays.items() if array.dtype.kind in "iu" and (array == error.outside).any()]
        return f"input {' or '.join(map(repr, having))}: {fact}" if having else f"{self.name}: {fact}"

    def call(self, fn: Any, arrays: Mapping[str, Any]) -> list[np.ndarray[Any, Any]]:
        """Call the function with these inputs, and return its outputs, in order, as NumPy arrays."""
        leaves = [leaf for name in self._order for leaf in self._leaves(name, arrays[name])]
        args, named = build(self._arguments, iter(leaves))
        with self._precision():
            result = fn(*args, **named)
            return [np.asarray(leaf) for leaf in flatten(self._signature.result, result, "result")]

    def _leaves(self, name: str, array: Any) -> Sequence[Any]:
        if name not in self._ids:
            return [array]
        ids = ids_of(array, f"input {name!r}")
        return [ids.high, ids.low]

    def example(self, fill: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return inputs of these sizes; `fill(dtype, shape)` makes each. Letters without a size have 1."""
        return {
            spec.name: fill(spec.dtype, tuple(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in spec.dims))
            for spec in self.inputs
        }


def _outputs(signature: FunctionSignature) -> Sequence[tuple[str, str]]:
    whole = leaves_of(signature.result, "result")
    if not isinstance(signature.result, Dict) or not all(isinstance(key, str) for key, _ in signature.result.of):
        return whole
    keys = [str(key) for key, _ in signature.result.of]
    children = [child for _, child in parts_of(signature.result)]
    by_key = [leaf for key, child in zip(keys, children, strict=True) for leaf in leaves_of(child, key)]
    return by_key if len({name for name, _ in by_key}) == len(by_key) else whole


def _spec(function: str, path: str, type: str) -> TensorSpec:
    dtype, dims = parts_of_type(type)
    known = _IDS.get(dtype, DTYPES.get(dtype))
    if known is None or datatype_of(known) is None:
        raise ExportError(
            f"{function}: {path} is {type}, and the Open Inference Protocol has no such dtype",
            "export a function that takes and returns numbers of at most 64 bits",
        )
    return TensorSpec(path, known, tuple(int(dim) if dim.isdecimal() else dim for dim in dims))
