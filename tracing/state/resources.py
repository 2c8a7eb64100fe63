"""Handles to state, as a user holds them.

A `Variable` has a name, a type and a home, which holds its value. In traced code its methods record ops with an effect;
elsewhere they run immediately.

A variable is a `jax.Array` and a leaf of pytrees. Wherever JAX takes it as an operand, JAX reads it there: an argument
that is a variable is an array inside of a `jax.grad`, a `jax.jit`, a `scan`. Only functions of `dflow.jit`, and what is
closed over, have the variable itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.element_arrays import plain_array
from dflow.tracing.errors import VariableError, VariableShapeError
from dflow.tracing.ir.explicit_sharding import explicit_sharding, with_sharding
from dflow.tracing.ir.row_marks import SUFFIX
from dflow.tracing.ir.types import ArrayType, array_type_of, dtype_name
from dflow.tracing.ir.updates import KINDS, indices_refusal, kind_refusal, lookup_type
from dflow.tracing.jax_frontend import Handle, is_tracing
from dflow.tracing.names_of_values import note_value
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.number_range import check_number, is_of_python
from dflow.tracing.primitives.namesakes import joined_namesakes
from dflow.tracing.primitives.state_primitives import gather_p, name_p, read_p, record_update, update_p, value_type
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.rows.rows_to_dense import note_limited
from dflow.tracing.rows.slices import ArrayPart
from dflow.tracing.source import as_code, at, caller
from dflow.tracing.state.container import contained, join
from dflow.tracing.state.context import Home, current_home, spread_here
from dflow.tracing.state.initial_value import Initial, TypedInitial, converted, given_array, initial_type, of_function
from dflow.tracing.state.row_updates import RowUpdates
from dflow.tracing.state.variable_as_array import OF_BUFFERS, register_as_array
from dflow.tracing.state.variable_hooks import NO_HOOKS, VariableHooks

_serials = itertools.count()
#: The least limit of a variable's size in memory, in bytes: arrays of this size or less stay in memory.
LEAST_MEMORY = 32 << 20

_OF_LOCATION = ("home", "device", "key", "sharding")
_OTHERS = ("serial", "is_named", "name", "type", "trainable", "gradient", "part", "marks", "loc", "handle", "namesakes")
_OF_KINDS = ("hooks", "is_saved", "max_memory", "_near_limit")
#: The attributes of a variable; setting any other is an error.
_FIELDS = frozenset((*_OF_LOCATION, *_OTHERS, *_OF_KINDS))

#: Attributes of variables in other frameworks, and how they are written here.
_ELSEWHERE = {
    "value": "; its value is {0}.read()",
    "numpy": "; its value is {0}.read(), and numpy.asarray({0}) in NumPy",
    "read_value": "; its value is {0}.read()",
    "eval": "; its value is {0}.read()",
    "load": "; write {0}.assign(value)",
    "set_value": "; write {0}.assign(value)",
    **OF_BUFFERS,
}


class Variable(RowUpdates, jax.Array):
    """A mutable array that traced code reads and writes.

    `initial`  the initial value (array or scalar), or a function without arguments that returns it. On a cluster the
               function's ops run only if the variable is new; if the value is large, they run on the variable's task.
               The value has the same bits as in one process
    `name`     names the variable in graphs, messages, checkpoints and across the tasks of a cluster; given none, a
               name is made up
    `dtype`    converts the initial value; given none, it keeps its own
    `near`     another variable, on whose task this one is placed
    `trainable`  whether `trainable_variables` includes it
    `gradient`   a function that `grad`, `value_and_grad` and `vjp` apply to the variable's gradient, an array, before
                 they return it: to clip it, scale it or stop part of it
    `sharding`   a `jax.sharding.Sharding` that says how the value is spread over this process's devices; a function
                 for `initial` is compiled so that each device makes its part. On a cluster a `NamedSharding` over an
                 `AbstractMesh`, which stands for the first devices of the variable's task. Within the `variables()` of
                 `dflow.distributed.AllReduce` a `PartitionSpec` over its axes

    `max_memory`  largest number of bytes in memory, at least 32 MiB, of the value and of those of variables near it;
                 the others are in files in the folder for temporary files of the variable's process. Arrays of at most
                 32 MiB stay in memory

    In one process each `Variable` is its own state. On a cluster the name is the variable: the first process to ask
    creates it and the others get it. In both, using a variable that has a later namesake in the same process is a
    `DuplicateNameWarning`. A second variable of the same name but another type raises VariableError, on a cluster when
    the variable is created: at the end of the block of `cluster.parameter_servers()`, or at its first use within. A
    variable cannot be made inside traced code.
    """

    # Over properties of `jax.Array`, which cannot be set.
    sharding = None  # type: ignore[assignment]
    weak_type = False

    # NumPy then uses our reflected operators instead of looping over an object.
    __array_ufunc__ = None

    #: The noun for it in messages.
    kind = "variable"

    #: Key of the value in the store of its task.
    key: str

    @suggests_keywords
    def __init__(
        self,
        initial: Initial,
        *,
        name: str | None = None,
        dtype: Any = None,
        near: Variable | None = None,
        trainable: bool = True,
        gradient: Callable[[Any], Any] | None = None,
        sharding: jax.sharding.Sharding | jax.sharding.PartitionSpec | None = None,
        max_memory: int | None = None,
    ) -> None:
        if not isinstance(name, str | None):
            raise VariableError(f"a variable is named {name!r}, a {type(name).__name__}", "give it a string")
        if is_tracing():
            raise VariableError(
                f"a variable ({name or 'unnamed'}) is created inside traced code, which runs once, not once a step",
                "create it before, and use it inside",
            )
        if not isinstance(near, Variable | None):
            raise VariableError(
                f"near={near!r} is a {type(near).__name__}, not a variable",
                "give it the variable whose task this one shall share",
            )
        is_spec = isinstance(sharding, jax.sharding.PartitionSpec) and spread_here() is not None
        if not is_spec and not isinstance(sharding, jax.sharding.Sharding | None):
            raise VariableError(
                f"sharding={sharding!r} is no jax.sharding.Sharding",
                "a PartitionSpec needs a mesh: jax.sharding.NamedSharding(mesh, spec), or AllReduce's variables()",
            )
        what = f"the initial value of variable {name or 'unnamed'!r}"
        first = _initial(plain_array(initial, what), dtype, what)
        self.serial = next(_serials)
        #: Whether the name was given, and not made up.
        self.is_named = name is not None
        self.name: str = contained(name or f"variable_{self.serial}")
        _check_name(self.name, near)
        self.home: Home = near.home if near is not None else current_home()
        first = self.home.prepared(first, name)
        self.type = initial_type(first, name)
        self.trainable = trainable
        self.gradient = gradient
        #: The part that it has of an array that several variables divide; such an array is saved as one.
        self.part: ArrayPart | None = None
        #: The variable that marks its changed rows, if these are tracked.
        self.marks: Variable | None = None
        #: What its kind adds to its gradients, updates and checkpoints.
        self.hooks: VariableHooks = NO_HOOKS
        #: Whether a checkpoint has it.
        self.is_saved = True
        #: The sharding over devices; None is one device, or wherever in this process JAX puts it.
        self.sharding = sharding
        self.max_memory = max_memory
        self._near_limit = near.memory_limit if near is not None and max_memory is None else None
        self.loc = caller()
        self.handle = Handle(self)
        if max_memory is not None:
            check_max_memory(self)
        note_limited(self)
        location = self.home.create(self, first, near)
        if location is not None:
            # JAX asks where an argument lies, so a variable passed to its functions goes there as it is spread.
            self.device, self.key, self.sharding = location
            self.type = self.handle.type = replace(self.type, sharding=explicit_sharding(location.sharding, self.shape))
        self.namesakes = joined_namesakes(self)
        join(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.type.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the value."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return int(np.prod(self.type.shape))

    @property
    def aval(self) -> Any:
        """The type of the value, as JAX has it."""
        return value_type(self.handle)

    @property
    def device(self) -> str | None:
        """The task that holds the value, `/job:ps/task:0`, or a device of this process, `/device:cpu:1`.

        None means wherever in this process JAX puts it. Reading it, or the key, creates a variable whose creation was
        deferred.
        """
        if "device" not in self.__dict__:
            self.home.settle(self)
        device: str | None = self.__dict__["device"]
        return device

    @device.setter
    def device(self, device: str | None) -> None:
        self.__dict__["device"] = device

    @property
    def memory_limit(self) -> tuple[Variable, int] | None:
        """The variable whose `max_memory` counts for it, which is itself or one that it is near, and that limit."""
        return self._near_limit if self.max_memory is None else (self, self.max_memory)

    def forget(self, reason: str) -> None:
        """Free the value. Later use of the variable raises VariableError, which gives the reason."""
        remedy = "make it again, or keep what outlives it outside the container"
        if self.marks is not None:
            self.marks.forget(reason)
        self.home.forget(self, f"variable {self.name!r} {reason}", remedy)
        self.namesakes.pop(self, None)

    def read(self) -> jax.Array:
        """The value: in traced code that at this point of the program, elsewhere the current one."""
        value: jax.Array = read_p.bind(handle=self.handle)
        if isinstance(value, jax.core.Tracer):
            note_value(value, self.name)
        return value

    def assign(self, value: Any) -> None:
        """Replace the value. Raises VariableShapeError when shape or dtype is not the variable's."""
        self._assign("assign", value)

    def assign_add(self, delta: Any, *, reduce: str | None = None) -> None:
        """Add `delta`, as one update that no other step comes between. Raises VariableShapeError.

        A `RowGradient` is added row by row, here and in `assign_sub`. Under `vmap`, `reduce="sum"` adds the sum of
        the batch's deltas; without it a delta that differs along the batch is refused. A delta that is the same for
        the whole batch is added once.
        """
        self._assign("assign_add", delta, reduce)

    def assign_sub(self, delta: Any) -> None:
        """Subtract `delta`, as one update. Raises VariableShapeError."""
        self._assign("assign_sub", delta)

    def assign_mul(self, factor: Any) -> None:
        """Multiply by `factor`, element by element, as one update. Raises VariableShapeError."""
        self._assign("assign_mul", factor)

    def assign_max(self, value: Any) -> None:
        """Keep the larger of each element and `value`'s, as one update. Raises VariableShapeError."""
        self._assign("assign_max", value)

    def assign_min(self, value: Any) -> None:
        """Keep the smaller of each element and `value`'s, as one update. Raises VariableShapeError."""
        self._assign("assign_min", value)

    def gather(self, indices: Any) -> jax.Array:
        """The rows at `indices`, integers of any shape: an array of shape `indices.shape + variable.shape[1:]`.

        Where the variable lives elsewhere only the rows travel, and the gradient of a gather is made of rows. A
        negative index counts from the end; one past either end gives the row at that end and no gradient, as in
        `array[indices]`. Raises VariableShapeError for indices that are no integers.
        """
        rows: jax.Array = gather_p.bind(self._indices("gather", indices), handle=self.handle, once=False)
        return rows

    def scatter_add(self, indices: Any, rows: Any, *, reduce: str | None = None) -> None:
        """Add `rows` to the rows at `indices`; rows for one index add up. `reduce` is as in `assign_add`."""
        self._scatter("scatter_add", indices, rows, reduce)

    def _assign(self, kind: str, value: Any, reduce: str | None = None) -> None:
        if isinstance(value, RowGradient) and (sign := KINDS[kind].sign) and value.shape == self.shape:
            value.check()
            self.scatter_add(value.indices, value.rows if sign > 0 else -value.rows, reduce=reduce)
            return
        self._check_kind(kind, reduce)
        given = self._fitting(kind, value, self.type, "")
        update_p.bind(given, handle=self.handle, kind=kind, reduce=reduce)

    def _scatter(self, kind: str, indices: Any, rows: Any, reduce: str | None = None) -> None:
        self._check_kind(kind, reduce)
        positions = self._indices(kind, indices)
        wanted = lookup_type(self.type, array_type_of(positions))
        given = self._fitting(kind, rows, wanted, f", at these indices rows of {wanted},")
        update_p.bind(positions, given, handle=self.handle, kind=kind, reduce=reduce)

    def _check_kind(self, kind: str, reduce: str | None) -> None:
        refusal = kind_refusal(kind, self.type)
        if refusal is not None:
            raise VariableShapeError(f"variable {self.name!r} has no {kind}: {refusal}", at=caller())
        if reduce not in (None, "sum"):
            raise VariableError(f"{kind} was given reduce={reduce!r}", "give it None or 'sum'")

    def _indices(self, method: str, indices: Any) -> Any:
        what = f"{method} of variable {self.name!r}: indices"
        indices = plain_array(indices, what)
        check_number(indices, what)
        array = indices.read() if isinstance(indices, Variable) else jnp.asarray(indices)
        refusal = indices_refusal(self.type, array_type_of(array))
        if refusal is not None:
            raise VariableShapeError(
                f"variable {self.name!r} holds {self.type} and has no {method} here: {refusal}",
                "give it integers that count along the variable's first dimension",
            )
        return array

    def _fitting(self, method: str, value: Any, wanted: ArrayType, why: str) -> Any:
        if isinstance(value, RowGradient):
            raise VariableShapeError(
                f"variable {self.name!r} holds {self.type} but {method} was given a row gradient of {value.shape}",
                "add it to a variable of its shape, or give its dense form, gradient.dense()",
            )

        def no_array(what: str) -> VariableShapeError:
            fact = f"variable {self.name!r} holds {self.type} but {method} was given {what}"
            return VariableShapeError(fact, "give it an array or a number")

        what = f"{method} of variable {self.name!r}"
        value = plain_array(value, what)
        check_number(value, what)
        array = value.read() if isinstance(value, Variable) else given_array(value, no_array)
        given = array_type_of(array)
        if given.weak:
            array = converted(array, wanted)
            given = array_type_of(array)
        if given.strong != wanted:
            raise VariableShapeError(
                f"variable {self.name!r} holds {self.type}{why} but {method} was given {given}",
                _remedy(wanted, given),
            )
        return with_sharding(array, wanted.sharding) if is_tracing() else array

    def __jax_array__(self) -> jax.Array:
        return self.read()

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.read(), dtype=dtype) if copy else np.asarray(self.read(), dtype=dtype)

    # An array. JAX's newer types say that it is of the same class as what is indexed.
    def __getitem__(self, index: Any) -> Any:
        # Indices with a type of their own are a lookup; all else is indexing, with all that JAX has for it.
        dtype = getattr(index, "dtype", None)
        if dtype is not None and self.shape and jnp.issubdtype(dtype, jnp.integer):
            return self.gather(index)
        check_number(index, f"index of variable {self.name!r}")
        return self.read()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar, {self.type}, and has no len()")
        return int(self.shape[0])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise VariableError(
            f"variable {self.name!r} cannot be assigned to by index",
            f"write {as_code(self.name)}.scatter_update(indices, rows), or {as_code(self.name)}.assign(whole)",
        )

    def __getattr__(self, name: str) -> Any:
        if name == "key" and "home" in self.__dict__:
            self.home.settle(self)
            return self.__dict__[name]
        if isinstance(getattr(type(self), name, None), property):
            return getattr(self.read(), name)  # raises the error that Python has replaced by this call
        remedy = _ELSEWHERE[name].format(as_code(self.name)) if name in _ELSEWHERE else ""
        raise AttributeError(f"'Variable' object has no attribute {name!r}{remedy}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FIELDS:
            raise VariableError(
                f"variable {self.name!r} has no attribute {name!r} to set",
                f"its value is written by a method: write {as_code(self.name)}.assign(value)",
            )
        object.__setattr__(self, name, value)

    # `==` compares values, as that of an array does. By the hash, dicts and sets find variables by identity: no two
    # living variables have an equal one. Lists and tuples of variables are searched by `is`.
    __hash__ = object.__hash__

    def __copy__(self) -> Variable:
        return self

    def __deepcopy__(self, memo: Any) -> Variable:
        raise VariableError(self._no_copy("copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise VariableError(self._no_copy("serialized"))

    def _no_copy(self, done: str) -> str:
        return (
            f"variable {self.name!r} is a handle to state and cannot be {done}{at(caller())}\n"
            "  make a second one from its value, dflow.variables(dflow.read(tree), prefix='copy/'), or save the value"
        )

    def __format__(self, spec: str) -> str:
        if spec and is_tracing():
            raise VariableError(
                f"variable {self.name!r} is formatted in traced code, where its value is not known",
                f"print it by jax.debug.print('{{}}', {as_code(self.name)}.read()), or outside of traced code",
            )
        return format(self.read(), spec) if spec else repr(self)

    def __repr__(self) -> str:
        device = self.__dict__.get("device")
        where = f" on {device}" if device else ""
        return f"<Variable {self.name!r}: {self.type}{where}>"


def check_max_memory(variable: Variable) -> None:
    """Check the limit of a new variable's memory."""
    given: Any = variable.max_memory
    if not isinstance(given, int | np.integer) or isinstance(given, bool) or given < LEAST_MEMORY:
        raise VariableError(
            f"max_memory of {variable.name!r}: expected a number of bytes, at least {LEAST_MEMORY}, got {given!r}",
            "give more, or leave it out",
        )
    if spread_here() is not None:
        raise VariableError(
            f"max_memory of {variable.name!r}: expected a variable on parameter tasks or in one process, got a copy or "
            f"a part in each worker",
            "make it within cluster.parameter_servers(), and train it by Async, Sync or Hybrid",
        )


def _check_name(name: str, near: Variable | None) -> None:
    if name.endswith(SUFFIX) and (near is None or name != near.name + SUFFIX):
        raise VariableError(f"a variable is named {name!r}, as only marks of changed rows are", "give it another name")


def _remedy(wanted: ArrayType, given: ArrayType) -> str:
    if wanted.shape != given.shape:
        return f"give it the shape {wanted.shape}, for instance with reshape or broadcast_to"
    if jnp.issubdtype(wanted.dtype, jax.dtypes.extended):
        return f"give it keys of {dtype_name(wanted.dtype)}, as jax.random.key makes them"
    name = np.dtype(wanted.dtype).name
    if jnp.issubdtype(wanted.dtype, jnp.integer) and jnp.issubdtype(given.dtype, jnp.inexact):
        return f"make the variable a float, or round first: jnp.round(number).astype(jnp.{name})"
    return f"write jnp.{name}(number)" if given.weak else f"convert it with .astype(jnp.{name})"


def _initial(initial: Initial, dtype: Any, what: str) -> Initial:
    """Return the initial value, of the dtype if that is given."""
    if dtype is None or not is_of_python(initial):
        check_number(initial, what)
    if callable(initial):
        return initial if isinstance(initial, TypedInitial) and dtype is None else of_function(initial, dtype, what)
    if dtype is None:
        return initial
    try:
        return jnp.asarray(initial, dtype)
    except OverflowError:
        check_number(initial, what)
        raise


register_as_array(Variable)


def add_update(variable: Variable, update: Any) -> None:
    """Add `update`, an array that broadcasts to the variable's shape, as one update, which no other step splits.

    It rounds as `optax.apply_updates` does: a bfloat16 parameter and a float32 update are added in float32, and their
    sum is rounded to bfloat16. An update rounded before it is added would give another parameter.
    """
    delta = jnp.broadcast_to(update, variable.shape)
    if jnp.result_type(variable.dtype, update) == variable.dtype:
        variable.assign_add(delta.astype(variable.dtype))
    else:
        record_update(variable, "assign_add_rounded", delta)


def is_variable(value: Any) -> bool:
    """Whether `value` is a variable."""
    return isinstance(value, Variable)


def read(tree: Any) -> Any:
    """The same pytree with each variable's value in its place."""
    return jax.tree_util.tree_map(lambda leaf: leaf.read() if is_variable(leaf) else leaf, tree, is_leaf=is_variable)


def name(value: Any, name: str) -> jax.Array:
    """The array `value`, called `name` in the graph."""
    named: jax.Array = name_p.bind(jnp.asarray(value), name=name)
    return named
