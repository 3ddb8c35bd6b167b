"""Names beside the points of a chart, placed so that they cover neither points nor each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from qdraft.study.chart_data import Line

_SIZE = 8  # points, of the font
_SAME = 14.0  # pixels, within which two points of one name share a label
# Where a label may stand: offset in points, and the sides that it is aligned by.
_OFFSETS = [
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
    (6, 0, "left", "center"),
    (-6, 0, "right", "center"),
    (6, 7, "left", "bottom"),
    (6, -7, "left", "top"),
    (-6, 7, "right", "bottom"),
    (-6, -7, "right", "top"),
    (0, 18, "center", "bottom"),
    (0, -18, "center", "top"),
    (14, 16, "left", "bottom"),
    (14, -16, "left", "top"),
    (0, 30, "center", "bottom"),
    (0, -30, "center", "top"),
]


def label_points(axes: Any, renderer: Any, lines: Sequence[Line], colors: Sequence[str]) -> None:
    """Write the names of the points of ``lines`` beside them, each in the colour of its line.

    The axes must have been laid out. A label that finds no free place stands where it covers
    least.
    """
    if not any(line.names for line in lines):
        return
    labels = _Labels(axes, renderer)
    for line in lines:
        labels.avoid(line)
    for i, line in enumerate(lines):
        for x, y, name in zip(line.x, line.y, line.names, strict=False):
            if name:
                labels.add((x, y), name, colors[i % len(colors)])


class _Labels:
    """The labels of one chart, and what they must not cover. Boxes are in pixels."""

    def __init__(self, axes: Any, renderer: Any) -> None:
        self._axes, self._renderer = axes, renderer
        self._area = axes.get_window_extent(renderer)
        self._taken: list[Any] = []
        self._named: list[tuple[str, Any]] = []

    def avoid(self, line: Line) -> None:
        """Keep labels off the points of a line and off what joins them."""
        from matplotlib.transforms import Bbox

        points = [self._axes.transData.transform(at) for at in zip(line.x, line.y, strict=True)]
        self._taken += [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]
        for start, stop in pairwise(points):
            n = max(1, int(abs(stop - start).max() / 4))
            for i in range(n):
                x, y = start + (stop - start) * i / n
                self._taken.append(Bbox.from_bounds(x - 2, y - 2, 4, 4))

    def add(self, point: tuple[float, float], name: str, color: str) -> None:
        """Label a point at the best of ``_OFFSETS``, unless a near one has the same label."""
        at = self._axes.transData.transform(point)
        if any(name == other and abs(at - near).max() < _SAME for other, near in self._named):
            return
        best: tuple[float, Any, Any] | None = None
        for dx, dy, ha, va in _OFFSETS:
            text = self._axes.annotate(
                name,
                point,
                (dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=_SIZE,
                color=color,
                annotation_clip=False,
            )
            text.set_in_layout(False)  # the layout is done
            box = text.get_window_extent(self._renderer)
            covered = sum(_overlap(box, other) for other in self._taken)
            covered += _outside(box, self._area)
            if best is not None and covered >= best[0]:
                text.remove()
                continue
            if best is not None:
                best[1].remove()
            best = (covered, text, box)
            if not covered:
                break
        assert best is not None
        self._taken.append(best[2])
        self._named.append((name, at))


def _overlap(a: Any, b: Any) -> float:
    """The area that two boxes share, in square pixels."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(width * height) if width > 0 and height > 0 else 0.0


def _outside(box: Any, area: Any) -> float:
    """The part of a box that lies outside the axes, in square pixels."""
    return float(box.width * box.height) - _overlap(box, area)
