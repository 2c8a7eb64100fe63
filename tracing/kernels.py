"""`@dflow.kernel`: a function of arrays with further implementations, each for a platform.

The plain function defines the kernel: its types, its derivatives and its batched form. It runs on every platform
without a registered implementation. The choice is made when a program is lowered, by the device it is lowered for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

import jax
import numpy as np

from dflow.tracing.devices.platforms import PLATFORMS
from dflow.tracing.errors import KernelError
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.jax_frontend import trace_context
from dflow.tracing.near_names import refuse_keywords
from dflow.tracing.primitives.kernel_choice import Choice, Implementation
from dflow.tracing.source import at, caller
from dflow.tracing.state.resources import is_variable, read

P = ParamSpec("P")
R = TypeVar("R")

_BY_KEYWORD = "give what is static by keyword"


class Kernel(Generic[P, R]):
    """A function of arrays with other implementations for some platforms. Made by `kernel`."""

    def __init__(self, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn)
        #: The function it was made of, which says what it means.
        self.plain = fn
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.loc = caller()
        #: The implementations by the platform that they are for.
        self.registered: dict[str, Implementation] = {}
        self._choices: dict[Hashable, _Call] = {}

    @property
    def implementations(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that replace the plain one, by platform: `cpu`, `cuda`, `rocm`, `tpu`."""
        return {platform: made.fn for platform, made in self.registered.items()}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Apply the kernel. Pass arrays and pytrees of arrays by position or keyword, static values by keyword."""
        call, leaves = self.call_of(args, kwargs)
        try:
            results = call.choice(*leaves)
            return cast(R, jax.tree_util.tree_unflatten(call.plain_types(leaves)[1], results))
        except TypeError as error:
            self._advise(error, leaves)
            raise

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Call, list[Any]]:
        """Return the `_Call` for these arguments, cached by structure and static values, and the flat operands.

        Raises KernelError for an argument that is neither an array nor static.
        """
        static = {key: value for key, value in kwargs.items() if not _holds_array(value)}
        given = (args, {key: value for key, value in kwargs.items() if key not in static})
        leaves, in_tree = jax.tree_util.tree_flatten(read(given))
        self._check_operands(leaves)
        key = in_tree, self._static_key(static)
        if key not in self._choices:
            self._choices[key] = _Call(self, in_tree, static)
        return self._choices[key], leaves

    def _advise(self, error: TypeError, leaves: Sequence[Any]) -> None:
        """If an error says that a concrete value was needed, and a number was passed by position, add the remedy."""
        numbers = [leaf for leaf in leaves if isinstance(leaf, int)]
        asked = isinstance(error, jax.errors.JAXTypeError) or "concrete values" in str(error)
        if numbers and asked and not any(_BY_KEYWORD in note for note in getattr(error, "__notes__", ())):
            where = at(caller()).removeprefix("\n")
            error.add_note(
                f"{where}\n  kernel {self.name!r} was given {numbers[0]!r} by position, as an array; {_BY_KEYWORD}"
            )

    def _check_operands(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            try:
                jax.typeof(leaf)
            except TypeError:
                raise KernelError(
                    f"kernel {self.name!r} is given {leaf!r} by position, which is no array", _BY_KEYWORD
                ) from None

    def _static_key(self, static: Mapping[str, Any]) -> Hashable:
        for key, value in static.items():
            try:
                hash(value)
            except TypeError:
                raise KernelError(
                    f"kernel {self.name!r} is given {key}={value!r}, which is neither an array nor hashable",
                    "make it a tuple, or an array",
                ) from None
        return tuple(sorted((key, type(value), value) for key, value in static.items()))

    def register(self, made: Implementation, platform: str | Sequence[str]) -> None:
        """Let `made` run on a platform, or several. Raises KernelError for one that is unknown or taken."""
        for lowered in self._lowered_for(platform):
            if lowered in self.registered:
                earlier = self.registered[lowered]
                raise KernelError(
                    f"kernel {self.name!r} has an implementation for {lowered} already, {earlier.label}, and is "
                    f"given another, {made.label}{at(made.loc)}\n  the first is registered{at(earlier.loc)}\n"
                    "  choose between them inside one function"
                )
        if self._choices:
            raise KernelError(
                f"kernel {self.name!r} is given an implementation, {made.label}, after it was called, and what is "
                f"compiled would not use it",
                "register all implementations where the kernel is made",
                at=made.loc,
            )
        self.registered.update(dict.fromkeys(self._lowered_for(platform), made))

    def _lowered_for(self, platform: str | Sequence[str]) -> list[str]:
        asked = [platform] if isinstance(platform, str) else list(platform)
        for name in asked:
            if name not in PLATFORMS:
                raise KernelError(
                    f"kernel {self.name!r} is given an implementation for the platform {name!r}, which is none",
                    f"the platforms are {', '.join(PLATFORMS)}",
                )
        return [lowered for name in asked for lowered in PLATFORMS[name]]

    def __repr__(self) -> str:
        return f"<dflow.kernel {self.name} for {', '.join(['any platform', *sorted(self.registered)])}>"


class _Call:
    """A kernel specialised to one structure of arguments and one set of static values."""

    def __init__(self, kernel: Kernel[Any, Any], in_tree: Any, static: Mapping[str, Any]) -> None:
        self._kernel, self._in_tree, self._static = kernel, in_tree, dict(static)
        self._trees: dict[Hashable, Any] = {}
        by_platform = {
            platform: replace(made, fn=functools.partial(self._checked, platform, made))
            for platform, made in kernel.registered.items()
        }
        flat = Implementation(lambda *leaves: self._flat(kernel.plain, leaves)[0], _name(kernel.plain), kernel.loc)
        self.choice = Choice(kernel.name, flat, by_platform, in_tree.num_leaves)

    def result_paths(self, leaves: Sequence[Any]) -> list[str]:
        """The path of each array in the result, as code: `[0]`, `['loss']`, or empty if the result is one array."""
        types, tree = self.plain_types(leaves)
        paths, _ = jax.tree_util.tree_flatten_with_path(jax.tree_util.tree_unflatten(tree, types))
        return [jax.tree_util.keystr(path) for path, _ in paths]

    def _flat(self, fn: Callable[..., Any], leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        args, kwargs = jax.tree_util.tree_unflatten(self._in_tree, leaves)
        return jax.tree_util.tree_flatten(fn(*args, **kwargs, **self._static))

    def plain_types(self, leaves: Sequence[Any]) -> tuple[list[ArrayType], Any]:
        """The types of the plain function's results for these operands, and the structure of its result."""
        taken = [array_type_of(leaf) for leaf in leaves]
        key = tuple(taken), trace_context()
        if key not in self._trees:
            tree: Any = None

            def run(*operands: Any) -> Any:
                nonlocal tree
                results, tree = self._flat(self._kernel.plain, operands)
                return results

            structs = jax.eval_shape(run, *(type.struct for type in taken))
            self._trees[key] = [array_type_of(struct).strong for struct in structs], tree
        found: tuple[list[ArrayType], Any] = self._trees[key]
        return found

    def _checked(self, platform: str, made: Implementation, *leaves: Any) -> list[Any]:
        """Return an implementation's results. Raises KernelError if their types are not the plain function's."""
        try:
            results, tree = self._flat(made.fn, leaves)
        except Exception as error:
            remedy = '\n  where JAX cannot batch it, register it with vmap="plain"'
            error.add_note(
                f"in {made.label}, the implementation of kernel {self._kernel.name!r} for {platform}{at(made.loc)}"
                f"{remedy if isinstance(error, NotImplementedError) else ''}"
            )
            raise
        types = [array_type_of(result).strong for result in results]
        wanted, wanted_tree = self.plain_types(leaves)
        if (types, tree) != (wanted, wanted_tree):
            taken = ", ".join(str(array_type_of(leaf)) for leaf in leaves)
            raise KernelError(
                f"kernel {self._kernel.name!r} gives {_shown(wanted, wanted_tree)} for ({taken}), and its "
                f"implementation for {platform}, {made.label}, gives {_shown(types, tree)}",
                f"make it give what {_name(self._kernel.plain)} gives",
                at=made.loc,
            )
        return results


@overload
def kernel(fn: Callable[P, R]) -> Kernel[P, R]: ...
@overload
def kernel(
    fn: Kernel[P, R],
    *,
    platform: str | Sequence[str],
    derivative: Literal["own", "plain"] | None = None,
    vmap: Literal["own", "plain"] = "own",
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def kernel(fn: Any, *, platform: Any = None, derivative: Any = None, vmap: Any = "own", **others: Any) -> Any:
    """Make a kernel of a plain function; or, given a kernel and a platform, return a decorator for an implementation.

        @dflow.kernel
        def softmax(x): ...                          # plain jax.numpy: the reference, and the default elsewhere

        @dflow.kernel(softmax, platform="gpu")
        def softmax_triton(x): ...                   # takes the same arguments, gives the same types

    fn          a function from arrays (in pytrees, by position or keyword) and static values (hashable, by keyword) to
                a pytree of arrays, without state or other effects; or a kernel
    platform    where the implementation runs: `cpu`, `cuda`, `rocm`, `tpu`, `gpu` for cuda and rocm, or a list of them
    derivative  the gradient on these platforms. `own`: the implementation's, in reverse mode only, also for the kernel
                as a whole; `plain`: the plain function's. Default: `own` for a function made by `jax.custom_vjp`, else
                `plain`
    vmap        batches on these platforms. `own`: `jax.vmap` of the implementation; `plain`: the plain function runs
    raises      KernelError for an unknown platform, one that has an implementation already, and an implementation
                added after a call of the kernel; TypeError for unknown options, and for options without a kernel

    The implementation is chosen when a program is lowered, also by `.lower(lowering_platforms=...)` and `jax.export`.
    If its results have other types than the plain function's, its first lowering raises KernelError.
    `dflow.check_kernel` compares the numbers.
    """
    options = ("platform", "derivative", "vmap")
    refuse_keywords("kernel", others, options, options)
    if not callable(fn):
        raise TypeError(f"kernel was given {fn!r}, which is no function{at(caller())}")
    if not isinstance(fn, Kernel):
        if platform is not None or derivative is not None or vmap != "own":
            raise TypeError(f"{_name(fn)} is no kernel yet{at(caller())}\n  decorate it with @dflow.kernel first")
        return Kernel(fn)
    if platform is None:
        raise TypeError(
            f"kernel {fn.name!r} is given an implementation without a platform{at(caller())}\n"
            f'  say @dflow.kernel({fn.name}, platform="cuda"), or one of {", ".join(PLATFORMS)}'
        )
    for option, value in (("derivative", derivative), ("vmap", vmap)):
        if value not in ("own", "plain", None):
            raise TypeError(f"{option} is 'own' or 'plain', not {value!r}{at(caller())}")

    def register(implementation: Callable[..., R]) -> Callable[..., R]:
        own = isinstance(implementation, jax.custom_vjp) if derivative is None else derivative == "own"
        fn.register(Implementation(implementation, _name(implementation), caller(), own, vmap == "own"), platform)
        return implementation

    return register


def _name(fn: Callable[..., Any]) -> str:
    named = fn.func if isinstance(fn, functools.partial) else fn
    return str(getattr(named, "__name__", type(fn).__name__))


def _shown(types: Sequence[ArrayType], tree: Any) -> str:
    """The types of a result in its structure."""
    if jax.tree_util.treedef_is_leaf(tree):
        return str(types[0])
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")").replace("*", "{}").format(*types)


def _holds_array(value: Any) -> bool:
    """Whether a keyword's value is an operand: an array, a variable, or a pytree with one of these."""
    leaves = jax.tree_util.tree_leaves(value, is_leaf=is_variable)
    return any(is_variable(leaf) or isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves)
