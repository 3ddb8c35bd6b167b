"""Charts as data: what a study draws in the terminal or to a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qdraft.decoding.intervals import Ratio


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right, joined.

    ``low`` and ``high`` are the ends of 95 % intervals of y, ``names`` the labels of the points;
    all three may be empty.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over one x axis. ``mark`` is an x that matters, with its label."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    mark: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class BarChart:
    """Named values in groups. ``even`` is the value at which nothing is gained or lost.

    ``groups`` maps the label of a group to a value for each of ``names`` (None: not measured),
    ``low`` and ``high`` in the same way to the ends of 95 % intervals. ``x_label`` says what the
    values are and ``y_label`` what the names are, with their units.
    """

    title: str
    x_label: str
    y_label: str
    names: tuple[str, ...]
    groups: dict[str, tuple[float | None, ...]]
    even: float | None = None
    low: dict[str, tuple[float | None, ...]] | None = None
    high: dict[str, tuple[float | None, ...]] | None = None


Chart = LineChart | BarChart


def line_of(
    label: str, points: Sequence[tuple[float, float | None]], names: Sequence[str] = ()
) -> Line:
    """The line through the points that have a value, from left to right, with their names."""
    named = zip(points, names or [""] * len(points), strict=True)
    known = sorted((x, y, name) for (x, y), name in named if y is not None)
    return Line(
        label,
        tuple(x for x, _, _ in known),
        tuple(y for _, y, _ in known),
        names=tuple(name for _, _, name in known) if names else (),
    )


def speed_chart(
    title: str,
    x_label: str,
    y_label: str,
    names: tuple[str, ...],
    groups: Mapping[str, Sequence[Ratio | None]],
) -> BarChart:
    """Bars of ratios with their intervals; a ratio of 1 is even."""

    def each(end: Callable[[Ratio], float | None]) -> dict[str, tuple[float | None, ...]]:
        return {
            label: tuple(None if ratio is None else end(ratio) for ratio in ratios)
            for label, ratios in groups.items()
        }

    return BarChart(
        title,
        x_label,
        y_label,
        names,
        each(lambda ratio: ratio.value),
        even=1.0,
        low=each(lambda ratio: ratio.low),
        high=each(lambda ratio: ratio.high),
    )


def costs_chart(v: Mapping[int, float], c: float | None, n_draft: int | None) -> LineChart:
    """v(n) by number of rows, against decoding one by one; ``n_draft`` marks the chosen width.

    With ``c`` also the cost of a whole round, of which the draft makes n - 1 rows.
    """
    points = [(1.0, 1.0), *((float(n), x) for n, x in sorted(v.items()))]
    lines = [line_of("v(n), measured", points)]
    if c is not None:
        with_draft = [(n, (n - 1) * c + x) for n, x in points]
        lines.append(line_of("with the draft, (n - 1) c + v(n)", with_draft))
    lines.append(line_of("one by one", [(n, n) for n, _ in points]))
    mark = None if n_draft is None else (n_draft + 1.0, f"n_draft {n_draft}")
    return LineChart(
        "Cost of a target decode",
        "rows in one decode (n_draft + 1)",
        "time (target tokens)",
        tuple(lines),
        mark,
    )


def places_chart(alpha_at: Sequence[float | None]) -> LineChart:
    """Acceptance rate by the token's place in its draft."""
    points = [(i + 1.0, alpha) for i, alpha in enumerate(alpha_at)]
    return LineChart(
        "Acceptance by place in the draft",
        "place in the draft (tokens)",
        "acceptance rate alpha",
        (line_of("alpha", points),),
    )
