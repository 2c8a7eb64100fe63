"""A graph as one HTML page with its script and data, which works without a network; and as a frame of a notebook.

A frame is a separate document, so two graphs in a notebook do not share styles, names or scripts. The script is
built from `dflow/dashboard/web` by `make dashboard`.
"""

from __future__ import annotations

import base64
import gzip
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"></head>
<body><div id="graph"></div><script type="text/plain" id="data">{data}</script><script>{script}</script></body></html>
"""


def html_page(data: Any, title: str) -> str:
    """Return the page of a graph; `data` is as `graph_json` gives it."""
    packed = base64.b64encode(gzip.compress(msgspec.json.encode(data), mtime=0)).decode()
    script = files("dflow").joinpath("dashboard/static/graph.js").read_text(encoding="utf-8")
    return _PAGE.format(title=escape(title), data=packed, script=script)


def data_url(svg: str) -> str:
    """Return a picture as a URL, for the source of an image."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def html_frame(page: str) -> str:
    """Return an element that shows the page in a notebook; its script can reach nothing outside of the frame."""
    style = "width:100%;height:34em;border:1px solid #8886;border-radius:6px;resize:vertical"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'
