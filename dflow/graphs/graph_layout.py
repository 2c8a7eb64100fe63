"""Layout of boxes and the edges between them: layers from top to bottom, few crossings, straight where possible.

Pure geometry: boxes are numbers with a size. Layers by the longest path from above; order within a layer by the
barycenters of neighbours; positions by least squares that keep boxes apart. Lengths are in px.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
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
    above: list[list[int]] = [[] for _ in range(count)]
    below: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        above[target].append(source)
        below[source].append(target)
    wished = _wished_layers(above, below)
    layers, filled = [0] * count, Counter[int]()
    for box in sorted(range(count), key=lambda box: (wished[box], box)):
        layers[box] = max([wished[box], *(layers[other] + 1 for other in above[box])])
        while filled[layers[box]] >= WIDEST:
            layers[box] += 1
        filled[layers[box]] += 1
    return layers


def _wished_layers(above: Sequence[list[int]], below: Sequence[list[int]]) -> list[int]:
    """Return layers by the longest paths, but with boxes moved down to their consumers where that shortens edges."""
    layers = [0] * len(above)
    for box, sources in enumerate(above):
        layers[box] = max((layers[source] + 1 for source in sources), default=0)
    for box in reversed(range(len(above))):
        if len(above[box]) <= len(below[box]) > 0:
            layers[box] = min(layers[target] for target in below[box]) - 1
    return layers


def laid_out(sizes: Sequence[Point], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of these sizes (width, height). Edges go from a lower box number to a higher."""
    layers = layers_of(len(sizes), edges)
    items, chains = _with_passing_points(sizes, layers, edges)
    rows: list[list[int]] = [[] for _ in range(max(layers, default=0) + 1)]
    for item, (_, layer) in enumerate(items):
        rows[layer].append(item)
    up, down = _neighbours(len(items), chains)
    _order(rows, up, down)
    xs = _columns(rows, [size[0] for size, _ in items], up, down)
    tops, total = _tops(rows, [size[1] for size, _ in items])
    ys = [tops[layer] + _row_height(rows[layer], items) / 2 for _, layer in items]
    centers = [(xs[item], ys[item]) for item in range(len(items))]
    paths = [tuple(_ends(chain, centers, items)) for chain in chains]
    width = max((x + items[item][0][0] / 2 for item, x in enumerate(xs)), default=0.0)
    return Layout(tuple(centers[: len(sizes)]), tuple(paths), width, total)


_Item = tuple[Point, int]


def _with_passing_points(
    sizes: Sequence[Point], layers: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[list[_Item], list[list[int]]]:
    """Return the boxes and the points where edges pass through layers, and each edge as a chain of indices of these."""
    items: list[_Item] = list(zip(sizes, layers, strict=True))
    chains = []
    for source, target in edges:
        passing = range(layers[source] + 1, layers[target])
        first = len(items)
        items += [((_PASSING, 0.0), layer) for layer in passing]
        chains.append([source, *range(first, len(items)), target])
    return items, chains


def _neighbours(count: int, chains: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[int]]]:
    up: list[list[int]] = [[] for _ in range(count)]
    down: list[list[int]] = [[] for _ in range(count)]
    for chain in chains:
        for above, under in itertools.pairwise(chain):
            down[above].append(under)
            up[under].append(above)
    return up, down


def _order(rows: list[list[int]], up: list[list[int]], down: list[list[int]]) -> None:
    """Sort each row by the positions of its neighbours in the previous row, alternately downwards and upwards."""
    place = {item: float(index) for row in rows for index, item in enumerate(row)}
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for row in rows if downwards else reversed(rows):
            near = up if downwards else down
            row.sort(key=lambda item: _mean([place[other] for other in near[item]], place[item]))
            place.update((item, float(index)) for index, item in enumerate(row))


def _columns(rows: list[list[int]], widths: list[float], up: list[list[int]], down: list[list[int]]) -> list[float]:
    """Return the x of each item: near the mean of its neighbours, in the order of its row, without overlap."""
    xs = [0.0] * len(widths)
    for row in rows:
        for item, x in zip(row, _apart([0.0] * len(row), [widths[item] for item in row]), strict=True):
            xs[item] = x
    for sweep in range(2 * _SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            near = up if sweep % 2 == 0 else down
            wished = [_mean([xs[other] for other in near[item]], xs[item]) for item in row]
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
    for index, position in enumerate(wished):
        value, size = position - room[index], 1
        while pools and pools[-1][0] > value:
            before, count = pools.pop()
            value, size = (before * count + value * size) / (count + size), count + size
        pools.append((value, size))
    settled = [value for value, size in pools for _ in range(size)]
    return [value + offset for value, offset in zip(settled, room, strict=False)]


def _tops(rows: list[list[int]], heights: list[float]) -> tuple[list[float], float]:
    """Return the top of each row, and the bottom of the last."""
    tops, y = [], 0.0
    for row in rows:
        tops.append(y)
        y += max((heights[item] for item in row), default=0.0) + LAYER_GAP
    return tops, max(y - LAYER_GAP, 0.0)


def _row_height(row: list[int], items: Sequence[_Item]) -> float:
    return max(items[item][0][1] for item in row)


def _ends(chain: Sequence[int], centers: Sequence[Point], items: Sequence[_Item]) -> Iterable[Point]:
    """Yield the points of an edge, from the bottom of its first box to the top of its last."""
    first, *passing, last = chain
    yield centers[first][0], centers[first][1] + items[first][0][1] / 2
    yield from (centers[item] for item in passing)
    yield centers[last][0], centers[last][1] - items[last][0][1] / 2


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise
