"""The documentation as a site: `make site` builds it from the pages of this folder, with warnings as errors.

`index.md` is the only list of pages: each of its headings is a part of the navigation, and each link below it a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import dflow  # noqa: E402
from plain_docstrings import as_rst  # noqa: E402

project = "dflow"
author = "the authors of dflow"
version = release = dflow.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"dflow {version}"
html_copy_source = False
html_show_sphinx = False
nb_execution_mode = "off"  # tests/test_docs.py runs them
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make links to files outside of this folder downloads; add the navigation to the index."""
    folder = (DOCS / docname).parent

    def outside(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS):
            return link[0]
        return f"{{download}}`{link[1]} <{link[2]}>`" if target.is_file() else link[1]

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)\)", outside, source[0])
    if docname == "decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n*\n```\n"
    if docname == "index":
        source[0] = re.sub(r"^## (.*)\n((?:(?!## ).*\n)*)", with_navigation, source[0], flags=re.MULTILINE)


def with_navigation(section: re.Match[str]) -> str:
    pages = re.findall(r"^- \[.*?\]\((.*?)\)", section[2], re.MULTILINE)
    listed = "\n".join(page.rpartition(".")[0] for page in pages)
    return f"{section[0]}\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n{listed}\n```\n\n"


def rewrite_docstring(app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Replace the lines of a docstring by the same in reStructuredText."""
    lines[:] = as_rst(lines)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", rewrite_docstring)
