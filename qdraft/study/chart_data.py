"""Charts as data: what a study draws, in the terminal or to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right, joined; ``low`` and ``high`` are 95 % intervals of y."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over one x axis; ``mark`` is an x that matters, with its label."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Named values in groups of ``names``; ``even`` is where nothing is won or lost.

    ``groups`` maps a label to a value (None: not measured) for each name, ``low`` and ``high``
    to the ends of 95 % intervals likewise.
    """

    title: str
    label: str
    names: tuple[str, ...]
    groups: dict[str, tuple[float | None, ...]]
    even: float | None = None
    low: dict[str, tuple[float | None, ...]] | None = None
    high: dict[str, tuple[float | None, ...]] | None = None


Chart = LineChart | BarChart


def line_of(label: str, points: Sequence[tuple[float, float | None]]) -> Line:
    """A line through the points that have a value, from left to right."""
    known = sorted((x, y) for x, y in points if y is not None)
    return Line(label, tuple(x for x, _ in known), tuple(y for _, y in known))


def costs_chart(v: dict[int, float], c: float | None, n_draft: int | None) -> LineChart:
    """v(n) against the number of rows, with the line of one by one and the chosen width."""
    points = [(1.0, 1.0), *((float(n), x) for n, x in sorted(v.items()))]
    lines = [line_of("v(n), measured", points)]
    if c is not None:
        lines.append(
            line_of("with the draft, (n - 1) c + v(n)", [(n, (n - 1) * c + x) for n, x in points])
        )
    lines.append(line_of("one by one", [(n, n) for n, _ in points]))
    mark = None if n_draft is None else (n_draft + 1.0, f"n_draft {n_draft}")
    return LineChart(
        "Cost of a target decode", "rows in one decode (n_draft + 1)", "target tokens",
        tuple(lines), mark,
    )  # fmt: skip


def places_chart(alpha_at: Sequence[float | None]) -> LineChart:
    """Acceptance rate by the token's place in its draft."""
    points = [(i + 1.0, a) for i, a in enumerate(alpha_at)]
    return LineChart(
        "Acceptance by place in the draft", "place", "alpha", (line_of("alpha", points),)
    )
