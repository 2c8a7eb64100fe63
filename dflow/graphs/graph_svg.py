"""A graph drawing as SVG: colours by device, a red bar on boxes with effects, details in tooltips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from dflow.graphs.graph_drawing import Box, Drawing, Edge
from dflow.graphs.graph_layout import Point, laid_out, layers_of

_PALETTE = ("#dbeafe", "#dcfce7", "#fef3c7", "#ede9fe", "#fce7f3", "#cffafe", "#ffedd5", "#ecfccb")
_NO_DEVICE = "#f1f5f9"
_CHARACTER = 6.7
_LINE = 15.0
_PADDING = 9.0
_MARGIN = 16.0
_LONGEST = 36
#: Edges across more layers than this are not drawn; the target box lists the value by name instead.
_FURTHEST = 12

_EFFECT = "#ea580c"
#: Most legend lines for variables and other values that are listed instead of drawn.
_MOST_ASIDE = 12

_STYLE = (
    "text{font:11px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#0f172a}"
    ".title{font-weight:600}.detail{fill:#475569}.takes{fill:#7c3aed}"
    ".box{stroke:#94a3b8}.group{stroke:#475569;stroke-width:2}"
    f".edge{{fill:none;stroke:#94a3b8;stroke-width:1.2}}.order{{stroke-dasharray:3 3;stroke:{_EFFECT}}}"
)
_TIP = (
    '<defs><marker id="dflow-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
    '<path d="M0,0 L8,4 L0,8 z" fill="#94a3b8"/></marker></defs>'
)


def svg(drawing: Drawing) -> str:
    """Return the picture as the text of one `<svg>` element."""
    layers = layers_of(len(drawing.boxes), [edge[:2] for edge in drawing.edges])
    drawing = drawing.without([edge for edge in drawing.edges if layers[edge.target] - layers[edge.source] > _FURTHEST])
    sizes = [_size(box) for box in drawing.boxes]
    layout = laid_out(sizes, [edge[:2] for edge in drawing.edges])
    colours = _colours(drawing.boxes)
    legend = [*_legend(drawing, colours)]
    top = 2 * _MARGIN + _LINE * len(legend)
    told = max((len(line) for _, line in legend), default=0) * _CHARACTER + 2 * _LINE
    width, height = max(layout.width, told) + 2 * _MARGIN, top + layout.height + _MARGIN
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">'
        ),
        f"<style>{_STYLE}</style>{_TIP}",
        '<rect width="100%" height="100%" fill="white"/>',
        *_drawn_legend(legend),
        f'<g transform="translate({_MARGIN:.0f},{top:.0f})">',
        *(_edge(path, edge) for path, edge in zip(layout.paths, drawing.edges, strict=True)),
        *map(_drawn, drawing.boxes, sizes, layout.centers, (colours[box.device] for box in drawing.boxes)),
        "</g></svg>",
    ]
    return "\n".join(parts)


def _lines(box: Box) -> list[tuple[str, str]]:
    """Return the lines of a box, each with its CSS class."""
    mark = "! " if box.has_effects else ""
    takes = " ".join(box.takes)
    lines = [("title", mark + box.title), ("detail", box.detail), ("takes", takes)]
    return [(kind, _short(line)) for kind, line in lines if line]


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _size(box: Box) -> Point:
    lines = _lines(box)
    return max(len(line) for _, line in lines) * _CHARACTER + 2 * _PADDING, len(lines) * _LINE + _PADDING


def _colours(boxes: Sequence[Box]) -> dict[str | None, str]:
    devices = sorted({box.device for box in boxes if box.device is not None})
    return {None: _NO_DEVICE} | {device: _PALETTE[index % len(_PALETTE)] for index, device in enumerate(devices)}


def _legend(drawing: Drawing, colours: Mapping[str | None, str]) -> Iterator[tuple[str | None, str]]:
    """Yield the lines above the picture, each with the colour it explains, or None."""
    if drawing.note:
        yield None, drawing.note
    yield from ((colour, device) for device, colour in colours.items() if device is not None)
    if any(box.has_effects for box in drawing.boxes):
        yield _EFFECT, "! writes state, or acts outside; a dashed line is the order of what touches one variable"
    yield from ((None, line) for line in drawing.aside[:_MOST_ASIDE])
    if len(drawing.aside) > _MOST_ASIDE:
        yield None, f"and {len(drawing.aside) - _MOST_ASIDE} more"


def _drawn_legend(lines: Sequence[tuple[str | None, str]]) -> Iterator[str]:
    for index, (colour, line) in enumerate(lines):
        y = _MARGIN + index * _LINE
        if colour is not None:
            yield f'<rect class="box" x="{_MARGIN}" y="{y}" width="10" height="10" fill="{colour}"/>'
        kind = "takes" if line.startswith("%") else "detail"
        yield f'<text class="{kind}" x="{_MARGIN + _LINE}" y="{y + 9}">{escape(line)}</text>'


def _edge(path: Sequence[Point], edge: Edge) -> str:
    """Return the SVG of an edge: a curve that is vertical where it crosses a layer."""
    (x, y), *rest = path
    line = f"M{x:.1f},{y:.1f}"
    for to_x, to_y in rest:
        middle = (y + to_y) / 2
        line += f" C{x:.1f},{middle:.1f} {to_x:.1f},{middle:.1f} {to_x:.1f},{to_y:.1f}"
        x, y = to_x, to_y
    kind = "edge" if edge.value is not None else "edge order"
    told = f"<title>{escape(edge.value)}</title>" if edge.value is not None else ""
    return f'<path class="{kind}" d="{line}" marker-end="url(#dflow-tip)">{told}</path>'


def _drawn(box: Box, size: Point, center: Point, colour: str) -> str:
    (width, height), x, y = size, center[0] - size[0] / 2, center[1] - size[1] / 2
    round_ = height / 2 if box.kind in ("input", "output") else 4
    parts = [
        f"<g><title>{escape(chr(10).join(box.told))}</title>",
        (
            f'<rect class="box {box.kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{round_:.0f}" fill="{colour}"/>'
        ),
    ]
    if box.has_effects:
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="4" height="{height:.1f}" fill="{_EFFECT}"/>')
    for index, (kind, line) in enumerate(_lines(box)):
        baseline = y + _PADDING / 2 + index * _LINE + 11
        parts.append(
            f'<text class="{kind}" x="{center[0]:.1f}" y="{baseline:.1f}" text-anchor="middle">{escape(line)}</text>'
        )
    return "".join((*parts, "</g>"))
