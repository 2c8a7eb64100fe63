"""The only file that touches JAX's internals.

State is recorded by primitives with an effect per resource (`ResourceEffect`; the primitives are in
`state_primitives.py`), so that any JAX trace keeps them in program order and `scan`, `cond`, `remat` and the custom
derivatives let them through. Names taken from `jax._src`, each with the public form that was tried:

- the effect allow-lists: none is public, and without them JAX refuses our effects inside control flow;
- `Effect`: its only public name is in `jax.extend.core`, which warns that it may go;
- a trace's context and source lines of an equation: needed to bind it again as it was traced; no public form;
- `Trace`: records each program that JAX would dispatch; the public `make_jaxpr` inlines small jitted functions;
- whether a trace is running: `jax.core.trace_state_clean` was removed from the public names;
- how a call is lowered for several platforms: the public form cannot keep a platform to its own function;
- how an object is read where it is an operand: the tables that JAX's own key arrays are in have no public form;
- lowering without the lines of callers: the public setting is of the whole process;
- the MLIR context of a thread: no public form;
- whether a backend is up: every public function that would tell starts one;
- the address at which collectives of CPUs listen: no setting has it;
- the class of errors about shardings in types;
- a call of a compiled function for types without a program: `jax.jit` compiles it immediately, and has no hook;
- the traces that are alive: no public form;
- a second array over the same buffers: the public forms commit it to its device;
- the argument that a traced value comes from: only messages of errors have it;
- the table of lowerings and the PRNG implementations, to read a graph's text: `jax.extend` lists part of the
  primitives, and no implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from itertools import compress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import jax
from jax._src import config as jax_config
from jax._src import core as jax_core
from jax._src import distributed as jax_distributed
from jax._src import dtypes as jax_dtypes
from jax._src import effects as jax_effects
from jax._src import pjit as jax_pjit
from jax._src import source_info_util, traceback_util, xla_bridge
from jax._src import tree_util as jax_tree_util
from jax._src.array import ArrayImpl
from jax._src.export import _export as jax_export
from jax._src.export import serialization_generated as export_tables
from jax._src.interpreters import ad as jax_ad
from jax._src.interpreters import batching as jax_batching
from jax._src.interpreters import mlir as jax_mlir
from jax._src.interpreters import partial_eval as jax_partial_eval
from jax._src.interpreters import pxla as jax_pxla
from jax._src.random.prng import PRNGImpl
from jax.extend import core as jex
from jax.extend.core import primitives as jax_primitives
from jax.extend.linear_util import WrappedFun
from jaxlib import _jax

from dflow.tracing.context_values import within
from dflow.tracing.devices.device import METADATA_KEY
from dflow.tracing.errors import DflowError, InternalError
from dflow.tracing.own_scopes import PREFIX
from dflow.tracing.parallel_iterations import PARALLEL_KEY
from dflow.tracing.source import Loc, caller, is_generated, is_installed, is_user_file

Jaxpr = Any
Equation = Any
F = TypeVar("F", bound=Callable[..., Any])

for _folder in ("dflow", "tracing", "lowering", "distributed"):
    for _root in {Path(__file__).absolute().parent.parent, Path(__file__).resolve().parent.parent}:
        source_info_util.register_exclusion(str(_root / _folder))
        traceback_util.register_exclusion(str(_root / _folder))


def is_backend_up() -> bool:
    """Whether JAX has looked for devices, and so read its settings of them."""
    up: bool = xla_bridge.backends_are_initialized()
    return up


def uses_gloo() -> bool:
    """Whether collectives of CPUs of several processes use Gloo, as they do by default."""
    return bool(jax_config.cpu_collectives_implementation.value == "gloo")


def use_gloo_at(address: str) -> None:
    """Have collectives of CPUs of several processes listen at `address`, one of this host.

    By default they resolve the name of the host, which may have no address, or one that others do not reach. To be
    called after `jax.distributed.initialize`, and before JAX looks for devices.
    """

    def make() -> Any:
        client = jax_distributed.global_state.client
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=address)
        return xla_bridge.make_cpu_client(collectives=collectives)

    xla_bridge.register_backend_factory("cpu", make, priority=0, fail_quietly=False)


#: JAX's error where the shardings in types do not decide that of a result. It has no public name.
ShardingTypeError: type[Exception] = jax_core.ShardingTypeError


class Access(Enum):
    """A kind of access to a resource: `HOST` is of queues and accumulators, the others are of variables."""

    READ = "read"
    WRITE = "write"
    #: Adds to the value, which is a read and a write in one, and comes to the same in any order.
    ADD = "add"
    #: An add that stands, under `vmap`, for the sum of the batch's.
    SUM = "sum"
    #: Any op on a queue or an accumulator.
    HOST = "host"


class Handle:
    """A weak reference to a variable, used in JAX's traces: JAX keeps parameters of primitives in global caches."""

    def __init__(self, variable: Any) -> None:
        self._variable = weakref.ref(variable)
        self.name, self.serial, self.type = variable.name, variable.serial, variable.type

    @property
    def variable(self) -> Any:
        """The variable. Raises InternalError when it has been deleted."""
        variable = self._variable()
        if variable is None:
            raise InternalError(f"variable {self.name!r} was deleted while a trace still uses it")
        return variable

    @property
    def handle(self) -> Handle:
        """The handle itself, so that code may take either a variable or a handle."""
        return self

    @property
    def is_dead(self) -> bool:
        """Whether the variable has been deleted."""
        return self._variable() is None

    def __repr__(self) -> str:
        return f"<{self.name}>"


def is_resource(value: Any) -> bool:
    """Whether `value` is a variable, a queue, an accumulator, or a handle to one."""
    return isinstance(getattr(value, "handle", None), Handle)


@dataclass(frozen=True)
class ResourceEffect(jax_effects.Effect):
    """An access to one resource; two are equal when they are the same access to the same resource."""

    access: Access
    handle: Handle

    def __str__(self) -> str:
        return f"{self.access.value}{self.handle}"

    __repr__ = __str__


@dataclass(frozen=True)
class NoteEffect(jax_effects.Effect):
    """Effect of an op that only marks values for inspection; the effect keeps JAX from removing the op."""

    def __str__(self) -> str:
        return "note"


for _allowed in (
    jax_effects.control_flow_allowed_effects,
    jax_effects.remat_allowed_effects,
    jax_effects.custom_derivatives_allowed_effects,
    jax_effects.lowerable_effects,
):
    _allowed.add_type(ResourceEffect)
    _allowed.add_type(NoteEffect)


#: Whether programs are lowered within `without_callers`.
_ARE_EQUAL: ContextVar[bool] = ContextVar("_ARE_EQUAL", default=False)


@dataclass(frozen=True)
class EquationOrigin:
    """Context of an equation's trace, to bind it again the same way, and the user's line.

    `within`  the name scopes of the call that the equation was inlined from
    """

    context: Any
    source_info: Any
    within: str = ""

    @cached_property
    def loc(self) -> Loc | None:
        """The user's line, or None when the trace did not keep it."""
        return next(self._locs(), None)

    @property
    def own_loc(self) -> Loc | None:
        """The user's line that is in no installed library, if there is one; else as `loc`."""
        return next((loc for loc in self._locs() if not is_installed(loc.file)), self.loc)

    def _locs(self) -> Iterator[Loc]:
        for frame in source_info_util.user_frames(self.source_info.traceback):
            if is_user_file(frame.file_name) and not is_generated(frame.file_name, frame.function_name):
                yield Loc(frame.file_name, frame.start_line)

    @property
    def scope(self) -> str:
        """The name scopes the equation was traced under, as JAX prints them."""
        return "/".join(filter(None, (self.within, str(self.source_info.name_stack))))

    @property
    def device(self) -> str | None:
        """The device scope the equation was traced under."""
        device: str | None = (self.context.xla_metadata or {}).get(METADATA_KEY)
        return device

    @property
    def parallel(self) -> int | None:
        """Number of iterations that may run concurrently, if a scope around the equation sets it."""
        said = (self.context.xla_metadata or {}).get(PARALLEL_KEY)
        return None if said is None else int(said)

    def _bound_scopes(self) -> Any:
        """The name scopes to bind it under: all, but where programs are to be equal the user's alone."""
        stack = self.source_info.name_stack
        if not _ARE_EQUAL.get():
            return stack
        return source_info_util.NameStack(
            tuple(one for one in stack.stack if not str(getattr(one, "name", "")).startswith(PREFIX))
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Bind primitives inside with the context and the line of the equation."""
        stack = source_info_util.current_name_stack() + self._bound_scopes()
        with (
            source_info_util.user_context(self.source_info.traceback, name_stack=stack),
            self.context.manager,
        ):
            yield


@contextmanager
def without_callers() -> Iterator[None]:
    """Lower programs so that equal ones are equal: without the lines of an op's callers, and names of tables."""
    with within(_ARE_EQUAL, True), jax_config.include_full_tracebacks_in_locations(False):
        yield


@contextmanager
def own_ir_context() -> Iterator[None]:
    """Lower programs in an MLIR context that no later one uses, so that another thread can compile them meanwhile.

    JAX 0.12 lowers several programs of a thread in one context, and a context's table of dialects is not thread-safe.
    """
    of_thread = getattr(jax_mlir, "_thread_local_context", None)  # older JAX makes a context for each program
    if of_thread is None:
        yield
        return
    before = of_thread.value
    of_thread.set_local(None)
    try:
        yield
    finally:
        of_thread.set_local(before)


def line_bound() -> Loc | None:
    """The user's line of the op that JAX is transforming; if the op has none, the line of the transformation."""
    return EquationOrigin(None, source_info_util.current()).loc or caller()


def line_of_program() -> Loc | None:
    """As `line_bound`, but prefer a line of the user's own program to one of an installed library."""
    return EquationOrigin(None, source_info_util.current()).own_loc or caller()


def origin_of(equation: Equation, within: str = "") -> EquationOrigin:
    """The origin of an equation; `within` are the name scopes of the call that it is inlined from."""
    return EquationOrigin(equation.ctx, equation.source_info, within)


def bind(primitive: Any, params: Any, values: Sequence[Any], origin: Any) -> list[Any]:
    """Apply a JAX primitive to values in the current trace; always return a list of results."""
    with origin.restored() if isinstance(origin, EquationOrigin) else nullcontext():
        results = primitive.bind(*values, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


def is_tracing() -> bool:
    """Whether a JAX trace is running."""
    return not jax_core.trace_state_clean()


def current_trace() -> Any:
    """Return the innermost trace that is running, to compare it by identity."""
    return jax_core.trace_ctx.trace


#: Number of references to the class of traces that are not of a trace.
_others = [0]


def living_traces() -> list[weakref.ref[Any]]:
    """The living traces of functions: running traces, and ended traces one of whose values is still referenced.

    A trace holds a reference to its class, so the reference count of the class shows without a search if none lives.
    """
    cls = jax_partial_eval.DynamicJaxprTrace
    references = sys.getrefcount(cls)
    if references == _others[0]:
        return []
    found = [weakref.ref(holder) for holder in gc.get_referrers(cls) if type(holder) is cls]
    _others[0] = references - len(found)
    return found


def source_of_trace(trace: Any) -> str:
    """The name and line of the traced function; empty for a jaxpr, and for a trace that another thread is making."""
    frame = getattr(trace, "frame", None)
    return "" if frame is None else getattr(frame.debug_info, "func_src_info", "")


def tracers_of(trace: Any) -> list[Any]:
    """The values of a trace that are alive."""
    return [holder for holder in gc.get_referrers(trace) if isinstance(holder, jax.core.Tracer)]


def is_of_program(holder: Any) -> bool:
    """Whether an object is a traced program or a part of one."""
    return isinstance(holder, (*_JAXPRS, jex.JaxprEqn, WrappedFun))


def line_of_tracer(tracer: Any) -> Loc | None:
    """The user's line that made a value of a trace, or None when the trace did not keep it."""
    info = getattr(tracer, "_line_info", None)
    return None if info is None else EquationOrigin(None, info).loc


def hides_frames(fn: F) -> F:
    """Decorate a function of the public API: its errors reach the user without the frames of JAX and of dflow."""

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return called  # type: ignore[return-value]


def hide_frames(error: Exception) -> None:
    """Remove the frames of JAX and dflow from an error's traceback, as JAX's setting for traceback filtering says."""
    with suppress(type(error)):
        _raised(error)
    frames, own = error.__traceback__, (__file__, traceback_util.__file__)
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    error.__traceback__ = frames
    notes = list(dict.fromkeys(getattr(error, "__notes__", ())))
    remedies = [note for note in notes if _FRAMES_REMOVED not in note]
    if notes:  # the remedy comes last; dflow's own errors need no word on frames
        error.__notes__ = (
            remedies
            if isinstance(error, DflowError)
            else [*(note for note in notes if _FRAMES_REMOVED in note), *remedies]
        )


#: Part of the note that JAX adds to an error whose frames it has removed.
_FRAMES_REMOVED = "JAX has removed its internal frames"


@traceback_util.api_boundary
def _raised(error: Exception) -> None:
    raise error


#: The code of JAX's function that flattens results, to know their structure in later calls.
_OF_RESULTS = jax_pxla.reflatten_outputs_for_dispatch.__code__


#: By identity, the newest variables of jaxprs that are the values of resources that the jaxprs' own functions returned.
#: A variable of an inlined function becomes another one; nothing else in its equation tells the two apart.
_RETURNED: OrderedDict[int, Any] = OrderedDict()
#: Number of these: far more than the traces under way have.
_MOST_RETURNED = 1 << 16


def returned_resources(jaxpr: Jaxpr) -> dict[int, Handle]:
    """The resources that a jaxpr's function returned itself, by index among the results, which are their values."""
    positions = {var: position for position, var in enumerate(jaxpr.outvars) if not is_literal(var)}
    own = [equation for equation in jaxpr.eqns if not positions.keys().isdisjoint(equation.outvars)]
    return {positions[e.outvars[0]]: e.params["handle"] for e in own if id(e.outvars[0]) in _RETURNED}


def replayed(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a jaxpr on values, and return handles in place of the resources that its function returned, unread."""
    returned = {jaxpr.outvars[position]: handle for position, handle in returned_resources(jaxpr).items()}

    def run(equation: Equation, operands: list[Any]) -> list[Any]:
        handles = [returned[var] for var in equation.outvars if var in returned]
        return handles or bind(equation.primitive, equation.params, operands, origin_of(equation))

    return evaluated(jaxpr, consts, args, run)


def evaluated(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], run: Callable[[Equation, list[Any]], Sequence[Any]]
) -> list[Any]:
    """The results of a jaxpr on values; `run` returns the results of an equation on operands."""
    env: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(atom: Any) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for equation in jaxpr.eqns:
        env.update(zip(equation.outvars, run(equation, [*map(value, equation.invars)]), strict=True))
    return [*map(value, jaxpr.outvars)]


#: The files of JAX that apply a function to the results of a traced function.
_OF_RESULT_TREES = tuple(str(Path(jax_core.__file__).with_name(name)) for name in ("tree_util.py", "flattree.py"))


def _trace_of_results(frame: FrameType | None) -> Any:
    """The trace that has just ended, if `frame` is where JAX converts its function's results; else None."""
    while frame is not None and frame.f_code.co_filename in _OF_RESULT_TREES:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != jax_partial_eval.__file__:
        return None
    return frame.f_locals.get("trace")


def register_leaf(cls: type[Any]) -> None:
    """Make a class of resources a leaf of pytrees, whose value JAX reads when it is an operand.

    The class has `aval`, `handle` and `read`. The rule for dispatch runs at each call of a function that JAX compiled;
    the caller gets the resource itself for a handle among the results.
    """

    def dispatched(resource: Any) -> tuple[tuple[Any, ...], Handle | None]:
        is_result = sys._getframe(1).f_code is _OF_RESULTS
        return ((), resource.handle) if is_result else ((resource.read(),), None)

    def undispatched(handle: Handle | None, values: Sequence[Any]) -> Any:
        return values[0] if handle is None else handle.variable

    def converted(resource: Any) -> Any:
        # JAX converts the results of a function when its trace has ended, and would keep the value as a constant.
        trace = _trace_of_results(sys._getframe(1))
        if trace is None:
            return resource.read()
        with jax_core.set_current_trace(trace):
            value = resource.read()
        _RETURNED[id(value.val)] = value.val  # kept alive, so that no other variable gets its identity
        if len(_RETURNED) > _MOST_RETURNED:
            _RETURNED.popitem(last=False)
        return value

    def mapped(proceed: Callable[[Any, Any], Any], size: Any, resource: Any, axis: Any) -> Any:
        return resource if axis is None else proceed(resource.read(), axis)

    jax_core.pytype_aval_mappings[cls] = lambda resource: resource.aval
    jax_dtypes.register_canonicalize_value_handler(cls, converted)
    jax_batching.to_elt_handlers[cls] = mapped
    jax_tree_util.dispatch_registry.register_node(cls, dispatched, undispatched)


def array_attributes() -> list[str]:
    """The public attributes that an array of JAX has outside of traces; the class `jax.Array` declares fewer."""
    return [name for name in dir(ArrayImpl) if not name.startswith("_")]


def await_arrays(tree: Any) -> None:
    """Wait until JAX's arrays of a pytree are computed. Raises the error of the program that makes one."""
    for leaf in jax.tree_util.tree_leaves(tree):
        if isinstance(leaf, ArrayImpl):
            leaf.block_until_ready()


def unlogged_callback_error(cls: type[BaseException]) -> None:
    """Keep JAX from logging an error of this class that a callback raises: the caller of the program raises it."""
    logging.getLogger("jax._src.callback").addFilter(
        lambda record: not (record.exc_info and isinstance(record.exc_info[1], cls))
    )


def register_refused(cls: type[Any], refuse: Callable[[Any], Any]) -> None:
    """Make JAX call `refuse` with each operand that is of this class."""
    jax_core.pytype_aval_mappings[cls] = refuse
    jax_dtypes.register_canonicalize_value_handler(cls, refuse)  # which `jax.lax` asks first


def register_missing(names: Iterable[str], refuse: Callable[[str, Any], NoReturn]) -> None:
    """Make access to one of these attributes of a traced array call `refuse` with the name and the array."""
    for name in names:
        setattr(jax_core.ShapedArray, name, jax_core.aval_property(functools.partial(refuse, name)))


# A handle is no operand: a compiled function gets the resource that it stands for.
jax.tree_util.register_pytree_node(Handle, lambda handle: ((), handle), lambda handle, _: handle.variable)


#: What a call of a dispatcher returns for arguments that have no program.
MISSED: Any = object()


def dispatcher(jitted: Any, on_miss: Callable[..., Any]) -> Any:
    """Return a function that calls the compiled programs of the `jax.jit` function `jitted`, as fast as that does.

    For arguments without a program it calls `on_miss`, which returns the result of `compiled_by_jax`, or of `missed`;
    for some, such as those of a program with callbacks, JAX has no fast path, and `on_miss` is called each time.
    As with `jax.jit`, all dispatchers of one Python function with the same options share programs.
    """
    info = jitted._jit_info
    fields = [field.name for field in dataclasses.fields(jax_pxla.JitGlobalCppCacheKeys)]
    key = jax_pxla.JitGlobalCppCacheKeys(**{name: getattr(info, name) for name in fields})
    programs = jax_pjit._get_cpp_global_cache(key.contains_explicit_attributes)
    if (own := jax_config.jax_jit_cpp_cache_obj.value) is not None and jax_core.trace_state_clean():
        programs = own
    static = info.static_argnums, info.static_argnames
    registry, placed = jax_tree_util.dispatch_registry, jax_pxla.cc_shard_arg
    found = _jax.pjit(jitted.__name__, jitted._fun, on_miss, *static, key, registry, placed, programs)
    found._fun = jitted._fun  # called op by op where a result is no number
    return found


def compiled_by_jax(jitted: Any, args: Any, kwargs: Any) -> Any:
    """Have JAX compile and run a `jax.jit` function; return JAX's internal result, as `dispatcher` expects it."""
    return jitted._cache_miss(*args, **kwargs)


def missed(result: Any = MISSED) -> tuple[Any, None, bool]:
    """Return what `on_miss` returns to have the call return `result`, and JAX keep no program for its arguments."""
    return result, None, True


def jit_options(jitted: Any) -> dict[str, Any]:
    """The options of a `jax.jit` function by name, with what JAX inferred from the signature; there is no public form.

    A tuple of the items can be compared, and hashed where the values can.
    """
    options = jitted._jit_info._asdict()
    return {name: value for name, value in options.items() if name not in ("fun_sourceinfo", "fun_signature")}


def uninterrupted(compiled: Any) -> Callable[..., Any]:
    """Return the C function behind a `jax.stages.Compiled`, if any, which an interrupt cannot end before its results.

    The public call is a Python function: an interrupt may end it after the donated buffers are gone.
    """
    found: Callable[..., Any] = compiled
    if isinstance(compiled, jax.stages.Compiled):
        found = compiled._executable.create_cpp_call(compiled._params) or compiled
    return found


def donates(stage: Any) -> bool:
    """Whether any argument of a `jax.stages.Traced` is donated."""
    return any(stage._params["donated_invars"])


def compiled_for(stage: Any, args_info: Any, compiler_options: dict[str, Any] | None) -> Any:
    """Compile a `jax.stages.Lowered` for arguments structured as `args_info`, which may have handles.

    In JAX's own `args_info` each handle is replaced by its resource, a leaf, so the structure would not fit.
    """
    compiled = stage.compile(compiler_options)
    _, in_tree = jax_tree_util.tracing_registry.flatten(args_info)
    compiled._params = compiled._params._replace(in_tree=in_tree)
    return compiled


def jit_disabled() -> bool:
    """Whether `jax.disable_jit` is in force."""
    return bool(jax_config.disable_jit.value)


def runs_plainly() -> bool:
    """Whether no trace or mapped axis is active, `jax.disable_jit` is off, and results are not checked for NaN or inf.

    It runs at every call, so it reads each setting directly: JAX's own `trace_state_clean` takes twice as long.
    """
    return (
        _trace.value is jax_core.eval_trace
        and _axes.value is jax_core.top_axis_env
        and not (_disable_jit.value or _debug_nans.value or _debug_infs.value)
    )


_trace, _axes = jax_core.trace_state_strong_ref, jax_core.axis_env_state
_disable_jit, _debug_nans, _debug_infs = jax_config.disable_jit, jax_config.debug_nans, jax_config.debug_infs


#: Classes of arguments without 64-bit numbers of NumPy: JAX's arrays, and Python's own numbers, which JAX checks.
NARROW_ARGUMENTS: frozenset[type[Any]] = frozenset({ArrayImpl, bool, int, float, complex, str, type(None)})


def argument_of(array: Any) -> str | None:
    """Return the argument, as an expression, that a traced array is or was computed from; None if it is not one."""
    told = array._origin_msg() if isinstance(array, jax.core.Tracer) else ""
    found = re.search(r"depends on the value of the argument (\S+)\.", told)
    return found and found[1]


def keeps_64_bits() -> bool:
    """Whether JAX takes 64-bit numbers as they are: `jax_enable_x64`, also by its context manager."""
    return bool(jax_config.enable_x64.value)


def checked_numbers() -> list[str]:
    """Those of `nan` and `inf` that JAX checks results for, with context managers, which the public flags ignore."""
    return list(compress(("nan", "inf"), (jax_config.debug_nans.value, jax_config.debug_infs.value)))


def trace_context() -> Any:
    """A hashable key of all JAX settings that a trace depends on, such as 64-bit numbers, device scopes and meshes."""
    return jax_config.trace_context()


def lower_by_platform(
    ctx: Any, by_platform: Mapping[str, Callable[..., Any]], default: Callable[..., Any], operands: Sequence[Any]
) -> Any:
    """Lower a call of the function for the platform, or a choice among those for several platforms.

    Each function is lowered for its platform alone. JAX's public `platform_dependent` lowers each function for all
    platforms, which fails for a kernel written for one. JAX caches lowered functions by type, not by platform, so the
    cache is not shared between the functions here.
    """

    def lowered(fn: Callable[..., Any], ctx: Any, *values: Any) -> Any:
        alone = ctx.platforms if ctx.platforms is not None else ctx.module_context.platforms
        if len(alone) < len(ctx.module_context.platforms) and len(alone) == 1:
            module = ctx.module_context.replace(
                platforms=tuple(alone), lowering_cache={}, cached_primitive_lowerings={}, pallas_lowering_cache={}
            )
            ctx = ctx.replace(module_context=module, platforms=None)
        return jax_mlir.lower_fun(fn, multiple_results=True)(ctx, *values)

    rules: dict[str, Callable[..., Any]] = {
        platform: functools.partial(lowered, fn) for platform, fn in by_platform.items()
    }
    return jax_mlir.lower_per_platform(
        ctx, "kernel", rules, functools.partial(lowered, default), jax_effects.no_effects, *operands
    )


def is_literal(atom: Any) -> bool:
    """Whether an equation's operand is a literal rather than a variable of the jaxpr."""
    return isinstance(atom, jex.Literal)


def closed_parts(closed: Any) -> tuple[Jaxpr, list[Any]]:
    """The jaxpr and the constants of a closed or an open jaxpr."""
    consts = list(getattr(closed, "consts", ()))
    return getattr(closed, "jaxpr", closed), consts


def accesses(effects: Any) -> tuple[list[Any], list[Any]]:
    """The variables read and the variables written by a set of effects, each once, in order of creation.

    A variable that is added to is in both lists.
    """
    added = (Access.ADD, Access.SUM)
    return _touched(effects, Access.READ, *added), _touched(effects, Access.WRITE, *added)


def only_added(effects: Any) -> list[Any]:
    """The variables that a set of effects adds to and touches in no other way."""
    others = set(_touched(effects, Access.READ, Access.WRITE))
    return [variable for variable in _touched(effects, Access.ADD, Access.SUM) if variable not in others]


def only_summed(effects: Any) -> list[Any]:
    """Variables of `only_added` whose every add is the sum over a batch."""
    others = set(_touched(effects, Access.ADD))
    return [variable for variable in only_added(effects) if variable not in others]


def host_resources(effects: Any) -> list[Any]:
    """The queues and accumulators that a set of effects is on, each once, in order of creation."""
    return _touched(effects, Access.HOST)


def _touched(effects: Any, *accesses: Access) -> list[Any]:
    found = {e.handle.variable for e in effects if isinstance(e, ResourceEffect) and e.access in accesses}
    return sorted(found, key=lambda resource: int(resource.serial))


def wrap_differentiation(primitive: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `wrap` around each of JAX's rules that differentiate a primitive."""
    for rules in (jax_ad.primitive_jvps, jax_ad.primitive_linearizations):
        if primitive in rules:
            rules[primitive] = wrap(rules[primitive])


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of a scan's operands that are constants, and that are carried. JAX 0.12 keeps them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def with_letters(dim: Any, value_of: Callable[[str], Any]) -> Any:
    """Return a symbolic dimension with another expression in place of each letter."""
    return dim._evaluate({letter: value_of(letter) for letter in letters_of(dim)})


def letters_of(dim: Any) -> set[str]:
    """Return the letters of a symbolic dimension."""
    letters: set[str] = dim._get_vars()
    return letters


def touches_state(effects: Any) -> bool:
    """Whether any of the effects is on a variable, a queue or an accumulator."""
    return any(isinstance(effect, ResourceEffect) for effect in effects)


def names_the_dead(effects: Any) -> bool:
    """Whether any of the effects is on a variable, a queue or an accumulator that has been deleted."""
    return any(isinstance(effect, ResourceEffect) and effect.handle.is_dead for effect in effects)


def abstract(value: Any) -> Any:
    """The abstract value that JAX traces a function with, for an array, a number or a ShapeDtypeStruct."""
    return jax_core.shaped_abstractify(value)


def source_of(jaxpr: Jaxpr) -> str:
    """The function that a jaxpr is of, with its line, as `source_of_trace` tells it."""
    source: str = jaxpr.debug_info.func_src_info
    return source


def is_array_type(aval: Any) -> bool:
    """Whether a JAX type is that of an array, and not of a `jax.Ref` or a type that a library added."""
    return isinstance(aval, jax_core.ShapedArray)


def strange_types(jaxpr: Jaxpr) -> list[Any]:
    """The types of closed-over values, arguments and results that are not arrays."""
    variables = (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)
    return [variable.aval for variable in variables if not is_array_type(variable.aval)]


def has_other_effects(effects: Any) -> bool:
    """Whether any effect is one that JAX has and dflow does not know."""
    return any(not isinstance(effect, (ResourceEffect, jax_core.NamedAxisEffect)) for effect in effects)


def make_jaxpr(fn: Callable[..., Any], *args: Any) -> tuple[Jaxpr, list[Any], Any]:
    """Trace `fn` on abstract or concrete arguments: the jaxpr, its constants, and the tree of ShapeDtypeStructs.

    `fn` is wrapped in a new object for each call: JAX caches traces by function, but `fn` may use other variables.
    """
    anew = functools.partial(fn)
    closed, out = jax.make_jaxpr(anew, return_shape=True)(*args)
    jaxpr, consts = closed_parts(closed)
    return jaxpr, consts, out


def live_part(jaxpr: Jaxpr, used: bool | Sequence[bool] = True) -> Jaxpr:
    """The program without equations that no used output needs, also inside loops and calls. Its inputs are the same."""
    live, _ = jax_partial_eval.dce_jaxpr(jaxpr, used, instantiate=True)
    return live


def retraced(
    param: Any, run: Callable[[Jaxpr, list[Any], Sequence[Any]], list[Any]], is_meant: Callable[[Jaxpr], bool]
) -> Any:
    """A parameter of an equation; a jaxpr that `is_meant` selects is replaced by the trace of `run` on it."""
    if not is_jaxpr(param) or not is_meant(closed_parts(param)[0]):
        return param
    jaxpr, consts = closed_parts(param)
    closed = jax.make_jaxpr(lambda *args: run(jaxpr, consts, args))(*(var.aval for var in jaxpr.invars))
    if not is_open(param):
        return closed
    return param if closed.consts else closed.jaxpr


def dispatched(fn: Callable[..., Any], *args: Any) -> tuple[Jaxpr, list[Any], Any]:
    """Trace `fn` like `make_jaxpr`, with one equation for each program that JAX would dispatch if `fn` ran now.

    Evaluated one by one, the equations give the same bits as `fn`. Those of `make_jaxpr` may not: it inlines small
    jitted functions, whose ops XLA would have fused.
    """

    def recorded(*args: Any) -> Any:
        with jax_core.set_current_trace(_AsDispatched(jax_core.trace_ctx.trace)):
            return fn(*args)

    return make_jaxpr(recorded, *args)


#: The parameter of a jitted function that is not inlined; older JAX has no kinds of inlining.
_KEPT_CALL: Any = jax.Inline.AUTO if hasattr(jax, "Inline") else False


class _AsDispatched(jax_core.Trace):
    """Forwards everything to the outer trace, but does not inline jitted functions and drops derivative rules."""

    def __init__(self, outer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outer = outer
        self.requires_low = outer.requires_low

    def _forward(self, method: str, *args: Any) -> Any:
        with jax_core.set_current_trace(self._outer):
            return getattr(self._outer, method)(*args)

    def process_primitive(self, primitive: Any, values: Any, params: Any, /) -> Any:
        kept = {**params, "inline": _KEPT_CALL} if "inline" in params else params
        return self._forward("process_primitive", primitive, values, kept)

    def process_call(self, *call: Any) -> Any:
        return self._forward("process_call", *call)

    def process_custom_jvp_call(self, primitive: Any, fn: Any, jvp: Any, values: Any, /, **_: Any) -> Any:
        return fn.call_wrapped(*values)

    def process_custom_vjp_call(self, primitive: Any, fn: Any, fwd: Any, bwd: Any, values: Any, /, **_: Any) -> Any:
        return fn.call_wrapped(*values)

    def stage_value(self, value: Any) -> Any:
        return self._forward("stage_value", value)

    def __getattr__(self, name: str) -> Any:
        # What few primitives ask of a trace, such as process_shard_map.
        return getattr(self._outer, name)


def closed_tracers(traced: Any) -> list[Any]:
    """The values of outer traces that a `jax.stages.Traced` closes over: the first arguments of its jaxpr.

    There is no public way to get them.
    """
    return list(traced._consts)


def is_staged() -> bool:
    """Whether the current trace stages ops into a jaxpr instead of running them."""
    return isinstance(jax_core.trace_ctx.trace, jax_partial_eval.DynamicJaxprTrace)


def call_staged(traced: Any, leaves: Sequence[Any]) -> Any:
    """Call a `jax.stages.Traced` inside a trace that stages it out, and return the result.

    The public call of the function would look up the trace once more.
    """
    results = jax_pjit.jit_p.bind(*traced._consts, *leaves, **traced._params)
    return jax.tree_util.tree_unflatten(traced.out_tree, results)


def devices_of_shardings(traced: Any) -> int:
    """Largest number of devices of any sharding in the `in_shardings` or `out_shardings` of a `jax.stages.Traced`.

    Its jaxpr does not have them, and there is no public form.
    """
    shardings = (*traced._params["in_shardings"], *traced._params["out_shardings"])
    return max((getattr(sharding, "num_devices", 1) for sharding in shardings), default=1)


#: The classes of jaxprs; newer JAX has one.
_JAXPRS = (jax_core.Jaxpr, getattr(jax_core, "ClosedJaxpr", jax_core.Jaxpr))


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter is a jaxpr, open or with its constants."""
    return isinstance(value, _JAXPRS)


def inner_parts(params: Mapping[str, Any]) -> list[tuple[Jaxpr, list[Any]]]:
    """The jaxprs among the parameters of an equation, each with its constants."""
    found = []
    for value in params.values():
        parts = value if isinstance(value, tuple | list) else [value]
        found += [closed_parts(part) for part in parts if is_jaxpr(part)]
    return found


def equations_within(jaxpr: Jaxpr) -> Iterator[Equation]:
    """The equations of a jaxpr, each before those of the jaxprs within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner, _ in inner_parts(equation.params):
            yield from equations_within(inner)


def is_open(jaxpr: Any) -> bool:
    """Whether a jaxpr is one that has no room for constants; newer JAX has none of these."""
    return not hasattr(jaxpr, "consts")


def same_buffers(array: Any) -> Any:
    """An array over the same memory, which stays valid when `array` is deleted; XLA copies a donated `array` meanwhile.

    None where memory cannot be shared like this: for a PRNG key, a dtype of less than a byte, an array on several
    devices or not on the first, and on backends other than the CPU, where the effect of a donation is untested.
    """
    if not isinstance(array, ArrayImpl) or jax.default_backend() != "cpu":
        return None
    try:
        part: Any = jax.dlpack.from_dlpack(array, copy=False)
    except (TypeError, BufferError, jax.errors.JaxRuntimeError):
        return None
    is_alike = part.devices() == array.devices()
    return ArrayImpl(array.aval, array.sharding, [part], committed=array.committed) if is_alike else None


def is_key_implementation(value: Any) -> bool:
    """Whether a parameter is a PRNG implementation; it has a `tag`, the short name that key dtypes print."""
    return isinstance(value, PRNGImpl)


def key_implementation(dtype: Any) -> Any:
    """The PRNG implementation of a key dtype."""
    return dtype._impl


@cache
def primitives_by_name() -> Mapping[str, Any]:
    """Every primitive with a lowering and every public primitive, by name; a public one takes precedence."""
    members = [getattr(jax_primitives, member) for member in dir(jax_primitives)]
    listed = [member for member in members if isinstance(member, jex.Primitive)]
    return {primitive.name: primitive for primitive in (*jax_mlir._lowerings, *listed)}


#: With the parts of MLIR that it imports, which have no types.
_EXPORT: Any = jax_export

#: The custom calls that a program may make by JAX's own rule for exports: library routines and layout, no callbacks.
STABLE_CALL_TARGETS: frozenset[str] = frozenset(jax_export._CUSTOM_CALL_TARGETS_GUARANTEED_STABLE)


def export_trees(blob: bytearray) -> Iterator[tuple[bool, int]]:
    """Yield, for each node of the pytrees in a serialised program, whether it is of a plain kind, and its depth.

    The trees of its derivatives follow, one level deeper for each order. Raises any error of reading malformed bytes;
    maliciously made bytes may have infinitely many nodes.
    """
    table, order = export_tables.Exported.GetRootAsExported(blob), 0
    kinds = export_tables.PyTreeDefKind
    plain = {kinds.leaf, kinds.none, kinds.tuple, kinds.list, kinds.dict}
    while table is not None:
        stack = [(tree, order) for tree in (table.InTree(), table.OutTree())]
        while stack:
            tree, depth = stack.pop()
            yield tree.Kind() in plain, depth
            stack += ((tree.Children(index), depth + 1) for index in range(tree.ChildrenLength()))
        table, order = table.Vjp(), order + 1


def with_module(exported: Any, text: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return the exported program with the module `text` in place of its module, and the ops of `text`.

    An op is its name and its target, which is empty unless the op is a custom call. Raises MLIR's errors for a text
    that is not a module.
    """
    with jax_mlir.make_ir_context():
        module = _EXPORT.ir.Module.parse(text)
        module.operation.verify()
        ops = list(_ops_of(module.operation))
        recent = _EXPORT.hlo.StablehloCompatibilityRequirement.WEEK_4
        version = _EXPORT.hlo.get_version_from_compatibility_requirement(recent)
        content = jax_mlir.module_to_bytecode(module)
        try:
            bytecode = _EXPORT._jax.mlir.serialize_portable_artifact(content, version, False)
        except jax.errors.JaxRuntimeError:  # an op that is newer than the version, such as JAX 0.12's cumulative sum
            bytecode = _EXPORT._jax.mlir.serialize_portable_artifact(content, version, True)
    return dataclasses.replace(exported, mlir_module_serialized=bytecode), ops


def parsed_module(exported: Any) -> Any:
    """Return the module of an exported program, as an operation of MLIR with the locations of its ops."""
    with jax_mlir.make_ir_context():
        return _EXPORT._jax.mlir.deserialize_portable_artifact(exported.mlir_module_serialized)


def module_of_version(exported: Any, version: str) -> bytes:
    """Return the module of an exported program in the bytecode of a version of StableHLO, such as `1.8.0`.

    Raises MLIR's errors for a module with an op that the version does not have.
    """
    module = parsed_module(exported)
    with module.context:
        content = jax_mlir.module_to_bytecode(module)
        found: bytes = _EXPORT._jax.mlir.serialize_portable_artifact(content, version, False)
    return found


def with_derivative(exported: Any, derivative: Any) -> Any:
    """Return the exported program with this derivative; None for no derivative."""
    return dataclasses.replace(exported, _get_vjp=None if derivative is None else lambda _: derivative)


def _ops_of(root: Any) -> Iterator[tuple[str, str]]:
    """Yield name and custom-call target of each operation inside `root`.

    Operations are views of `root`, so the caller must keep a reference to it.
    """
    stack = [root]
    while stack:
        operation = stack.pop()
        is_call = operation.name == "stablehlo.custom_call"
        yield operation.name, operation.attributes["call_target_name"].value if is_call else ""
        stack += (inner.operation for region in operation.regions for block in region for inner in block)
