"""Layout of boxes and the edges between them: layers from top to bottom, few crossings, straight where possible.

Pure geometry: boxes are numbers with a size. Layers by the longest path from above; order within a layer by the
barycenters of neighbours; positions by least squares that keep boxes apart. Lengths are in px.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

COLUMN_GAP = 24.0
LAYER_GAP = 34.0
#: Most boxes in a layer; more boxes make the picture longer instead.
WIDEST = 10
_SWEEPS = 6
#: Width that an edge takes in each layer that it passes through.
_PASSING = 10.0


@dataclass(frozen=True)
class Layout:
    """`centers` of the boxes, `paths` of the edges in their order (each with a point per layer), and the total size."""

    centers: tuple[Point, ...]
    paths: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def layers_of(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return a layer for each box, such that every edge goes down. Edges go from a lower box number to a higher.

    Boxes with few inputs are just above their first consumer. No layer has more than `WIDEST` boxes.
    """
    above, below = _neighbours(count, edges)
    wished = [0] * count
    for box in range(count):
        wished[box] = max((wished[source] + 1 for source in above[box]), default=0)
    for box in reversed(range(count)):
        if len(above[box]) <= len(below[box]) > 0:
            wished[box] = min(wished[target] for target in below[box]) - 1
    layers, filled = [0] * count, Counter[int]()
    for box in sorted(range(count), key=lambda box: (wished[box], box)):
        layers[box] = max([wished[box], *(layers[other] + 1 for other in above[box])])
        while filled[layers[box]] >= WIDEST:
            layers[box] += 1
        filled[layers[box]] += 1
    return layers


def laid_out(sizes: Sequence[Point], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of these sizes (width, height). Edges go from a lower box number to a higher."""
    layers, items, chains = layers_of(len(sizes), edges), [*sizes], list[list[int]]()
    for source, target in edges:  # an edge is an item, too, in each layer that it passes through
        passing = range(layers[source] + 1, layers[target])
        chains.append([source, *range(len(items), len(items) + len(passing)), target])
        items += [(_PASSING, 0.0)] * len(passing)
        layers += passing
    rows: list[list[int]] = [[] for _ in range(max(layers, default=-1) + 1)]
    for item, layer in enumerate(layers):
        rows[layer].append(item)
    up, down = _neighbours(len(items), (link for chain in chains for link in itertools.pairwise(chain)))
    _sort(rows, up, down)
    widths = [width for width, _ in items]
    xs = _columns(rows, widths, up, down)
    heights = [max(items[item][1] for item in row) for row in rows]
    tops = [sum(heights[:row]) + row * LAYER_GAP for row in range(len(rows))]
    centers = [(x, tops[layer] + heights[layer] / 2) for x, layer in zip(xs, layers, strict=True)]
    width = max((x + width / 2 for x, width in zip(xs, widths, strict=True)), default=0.0)
    height = tops[-1] + heights[-1] if rows else 0.0
    paths = tuple(tuple(_path(chain, centers, items)) for chain in chains)
    return Layout(tuple(centers[: len(sizes)]), paths, width, height)


def _neighbours(count: int, links: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each item, those linked from above and those linked below."""
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for above, under in links:
        down[above].append(under)
        up[under].append(above)
    return up, down


def _sort(rows: list[list[int]], up: list[list[int]], down: list[list[int]]) -> None:
    """Sort each row by the positions of its neighbours in the previous row, alternately downwards and upwards."""
    position = {item: float(index) for row in rows for index, item in enumerate(row)}
    for sweep in range(_SWEEPS):
        near = down if sweep % 2 else up
        for row in reversed(rows) if sweep % 2 else rows:
            row.sort(key=lambda item: _mean([position[other] for other in near[item]], position[item]))
            position.update((item, float(index)) for index, item in enumerate(row))


def _columns(rows: list[list[int]], widths: list[float], up: list[list[int]], down: list[list[int]]) -> list[float]:
    """Return the x of each item: near the mean of its neighbours, in the order of its row, without overlap."""
    xs = [0.0] * len(widths)
    for sweep in range(-1, 2 * _SWEEPS):
        near = down if sweep % 2 else up
        for row in reversed(rows) if sweep % 2 else rows:
            # The first sweep only puts the items of each row side by side.
            wished = [_mean([xs[other] for other in near[item]] if sweep >= 0 else [], xs[item]) for item in row]
            for item, x in zip(row, _apart(wished, [widths[item] for item in row]), strict=True):
                xs[item] = x
    left = min((x - width / 2 for x, width in zip(xs, widths, strict=True)), default=0.0)
    return [x - left for x in xs]


def _apart(wished: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Return the positions nearest to `wished` (by least squares) that keep the order and the gaps.

    Isotonic regression: minus the room that earlier items take, positions must not decrease, so decreasing ones are
    averaged.
    """
    room = [0.0]
    for left, right in itertools.pairwise(widths):
        room.append(room[-1] + (left + right) / 2 + COLUMN_GAP)
    pools: list[tuple[float, int]] = []
    for position, offset in zip(wished, room, strict=False):
        value, size = position - offset, 1
        while pools and pools[-1][0] > value:
            before, count = pools.pop()
            value, size = (before * count + value * size) / (count + size), count + size
        pools.append((value, size))
    settled = [value for value, size in pools for _ in range(size)]
    return [value + offset for value, offset in zip(settled, room, strict=False)]


def _path(chain: Sequence[int], centers: Sequence[Point], items: Sequence[Point]) -> Iterator[Point]:
    """Yield the points of an edge, from the bottom of its first box to the top of its last."""
    first, *passing, last = chain
    yield centers[first][0], centers[first][1] + items[first][1] / 2
    yield from (centers[item] for item in passing)
    yield centers[last][0], centers[last][1] - items[last][1] / 2


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
