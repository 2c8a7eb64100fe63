"""Docstrings of dflow as reStructuredText: plain paragraphs, lists of arguments in two columns, indented code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

#: An argument, or several: names, two spaces at least, their meaning.
_ITEM = re.compile(r"((?:`?\*{0,2}[\w.]+`?(?:, )?)+) {2,}(?=\S)")


def as_rst(lines: Sequence[str]) -> list[str]:
    """Return the lines of a docstring in reStructuredText."""
    found: list[str] = []
    for paragraph in _paragraphs(lines):
        if all(line.startswith("    ") for line in paragraph):
            found += ["::", "", *paragraph, ""]
        else:
            found += _items(paragraph)
    return found


def _paragraphs(lines: Sequence[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _items(paragraph: Sequence[str]) -> list[str]:
    """Return a paragraph with each argument as a definition, and each `- ` as an item of a list."""
    texts: list[tuple[str, str]] = []  # the text before each, and the text
    for line in paragraph:
        item = _ITEM.match(line)
        if item:
            names = item[1].replace("`", "")
            texts.append((f"``{names}``\n    ", line[item.end() :]))
        elif line.startswith("- "):
            texts.append(("- ", line[2:]))
        elif texts and (line.startswith("  ") or not texts[-1][0]):
            texts[-1] = (texts[-1][0], f"{texts[-1][1]} {line.strip()}")
        else:
            texts.append(("", line))
    return [line for before, text in texts for line in (*f"{before}{_inline(text)}".split("\n"), "")]


def _inline(text: str) -> str:
    """Return a text with its code in double backticks, and characters that mean something in markup escaped."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"([\\*|])|_(?=\W|$)", lambda found: "\\" + found[0], parts[index])
        if index and re.match(r"\w", parts[index]):  # markup ends before a word only so
            parts[index] = "\\ " + parts[index]
    return "".join(f"``{part}``" if index % 2 else part for index, part in enumerate(parts))
