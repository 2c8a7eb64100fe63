"""Remedies for an unknown name: the known names that are spelt like it."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from dflow.tracing.source import at, caller

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def did_you_mean(given: str, known: Iterable[str], otherwise: str) -> str:
    """Return "did you mean ...?" with the known names similar to `given`; `otherwise` if there are none."""
    near = difflib.get_close_matches(given, list(known))
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def refuse_keywords(name: str, given: Iterable[str], known: Sequence[str], own: Sequence[str]) -> None:
    """Raise TypeError for a keyword that is not in `known`; `own` are the keywords of the function `name` itself."""
    for keyword in given:
        if keyword not in known:
            remedy = did_you_mean(keyword, known, f"it takes {', '.join(own)}")
            raise TypeError(f"{name} was given {keyword!r}, which it does not take{at(caller())}\n  {remedy}")


def keywords_of(fn: Callable[..., object], given: Iterable[str]) -> Iterable[str]:
    """The keywords that a function takes; `given` if it takes any keyword or has no signature."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return given
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    return [each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]


def suggests_keywords(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function: its TypeError about an unknown keyword also suggests similar keywords."""
    known = frozenset(inspect.signature(fn).parameters)

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if known.issuperset(kwargs):
            return fn(*args, **kwargs)
        try:
            return fn(*args, **kwargs)
        except TypeError as error:
            error.add_note(f"{at(caller()).removeprefix(chr(10))}\n  {near_keywords(fn, kwargs)}")
            raise

    return called


def suggests_fields(cls: type[T]) -> type[T]:
    """Wrap the constructor of a dataclass as `suggests_keywords` does a function."""
    cls.__init__ = suggests_keywords(cls.__init__)  # type: ignore[method-assign]
    return cls


def near_keywords(fn: Callable[..., object], given: Iterable[str]) -> str | None:
    """Return a remedy that suggests similar names for the first keyword that `fn` lacks; None if it has them all."""
    known = [name for name in inspect.signature(fn).parameters if name not in ("self", "fun")]
    strange = next((name for name in given if name not in known), None)
    return None if strange is None else did_you_mean(strange, known, f"the options are {', '.join(known)}")
