"""What to say of a name that nobody knows: those it may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from dflow.tracing.source import at, caller


def did_you_mean(given: str, known: Iterable[str], otherwise: str) -> str:
    """The question after the known names near to the one given; `otherwise` where none is."""
    near = difflib.get_close_matches(given, list(known))
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def refuse_keywords(name: str, given: Iterable[str], known: Sequence[str], own: Sequence[str]) -> None:
    """Raise TypeError for a keyword that is none of `known`; `own` are those that `name` takes itself."""
    for keyword in given:
        if keyword not in known:
            remedy = did_you_mean(keyword, known, f"it takes {', '.join(own)}")
            raise TypeError(f"{name} was given {keyword!r}, which it does not take{at(caller())}\n  {remedy}")
