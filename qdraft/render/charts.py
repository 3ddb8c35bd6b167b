"""Charts, drawn: as text for the terminal, as PNG, SVG or PDF by matplotlib.

Files have no background. Their colours can be read on white and on black; an SVG also follows the
reader's colour scheme.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.paths import new_file
from qdraft.render.foreign import one_line
from qdraft.render.point_labels import label_points
from qdraft.study.chart_data import BarChart, Chart, Line, LineChart

_WIDTH, _HEIGHT = 78, 16
_BAR = 40  # columns of the longest bar
_LONGEST_NAME = 60  # characters
_MARKERS = "*o+x#"
_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}

_INK = "#767676"  # text and axes: 4.5 to 1 against white and against black
# Each 3 to 1 or better against white and against #111111.
_COLORS = ("#2f7fd1", "#d0602a", "#2a9461", "#a35fc4", "#a67c00")
_DOTS = ("o", "s", "^", "D", "v")
_STYLES = ("-", "--", ":", "-.", (0, (5, 1)))
_SCHEMES = (
    "<style>.qdraft-chart{color:#333}"
    "@media (prefers-color-scheme:dark){.qdraft-chart{color:#ccc}}</style>"
)


def draw_text(chart: Chart) -> str:
    """A chart as text of at most 79 columns, without colour.

    Raises UsageError for a line chart if the plotting library is not installed.
    """
    chart = _on_lines(chart)
    return _bars_as_text(chart) if isinstance(chart, BarChart) else _lines_as_text(chart)


def _on_lines(part: Any) -> Any:
    """A chart whose names and labels are each on one line, without hidden characters."""
    if isinstance(part, str):
        return one_line(part, _LONGEST_NAME)
    if isinstance(part, tuple):
        return tuple(map(_on_lines, part))
    if isinstance(part, dict):
        return {_on_lines(key): value for key, value in part.items()}
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in dataclasses.fields(part)]
        changes = {name: _on_lines(getattr(part, name)) for name in names}
        return dataclasses.replace(part, **changes)
    return part


def _bars_as_text(chart: BarChart) -> str:
    """Each value as a bar with its figure; groups one after the other."""
    values = [x for group in chart.groups.values() for x in group if x is not None]
    most = max([*values, chart.even or 0.0]) or 1.0
    width = max(map(len, chart.names), default=0)
    even = None if chart.even is None else round(_BAR * chart.even / most)
    lines = [f"{chart.title}: {chart.x_label} by {chart.y_label}"]
    for label, group in chart.groups.items():
        if len(chart.groups) > 1:
            lines.append(f"  {label}")
        for name, x in zip(chart.names, group, strict=True):
            bar = "" if x is None else "#" * round(_BAR * max(0.0, x) / most)
            if even is not None:  # a bar that ends before the mark did not reach it
                bar = f"{bar:<{even}}|" if len(bar) <= even else f"{bar[:even]}|{bar[even + 1 :]}"
            figure = "n/a" if x is None else f"{x:.3g}"
            lines.append(f"  {name:<{width}} {bar:<{_BAR + 1}} {figure}")
    if chart.even is not None:
        lines.append(f"  {'':<{width}} {'':<{even or 0}}| = {chart.even:g}")
    return "\n".join(line.rstrip() for line in lines)


def _lines_as_text(chart: LineChart) -> str:
    """Lines by plotext; the names of their points follow in a list."""
    try:
        import plotext
    except ImportError as error:
        raise UsageError(
            "drawing needs plotext",
            hint="install it with pip install 'qdraft[plot]', or leave charts out with --no-plot",
        ) from error
    lines = [line for line in chart.lines if line.x]
    if not lines:
        return f"{chart.title}: nothing was measured"
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(_WIDTH, _HEIGHT)
    for line, marker in zip(lines, _MARKERS, strict=False):
        signal = figure.signal(list(line.x), list(line.y), marker=marker)
        signal.label(line.label)
        signal.lines(len(line.x) > 1)
        figure.draw(signal)
    if chart.mark:
        figure.line(chart.mark[0], "v", label=chart.mark[1])
    figure.title(f"{chart.title}: {chart.y_label}")
    figure.label(chart.x_label, "x")
    text: str = figure.build().string(colorless=True)
    drawn = [row.rstrip() for row in text.splitlines()]
    return "\n".join([*drawn, *_list_points(lines)])


def _list_points(lines: Sequence[Line]) -> list[str]:
    """The points that have names, from left to right, in rows of at most 79 columns."""
    names = {x: name for line in lines for x, name in zip(line.x, line.names, strict=False) if name}
    rows: list[str] = []
    for x, name in sorted(names.items()):
        text = f"{name} {x:.4g}"
        if rows and len(rows[-1]) + len(text) + 2 <= 79:
            rows[-1] += f", {text}"
        else:
            rows.append(f"  {text}")
    return rows


def require_plotting(path: Path | None = None) -> None:
    """Raise UsageError if matplotlib is missing, or if ``path`` names no format that it writes."""
    if path and path.suffix.lower() not in _FORMATS:
        raise UsageError(f"--plot is {path} but its name must end in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            "charts and reports need matplotlib",
            hint="install it with pip install 'qdraft[plot]'",
        )


def save_charts(charts: Sequence[Chart], path: Path) -> None:
    """Write all charts (at least one) to one file in the format of its name.

    Raises UsageError as ``require_plotting`` does.
    """
    require_plotting(path)
    kind = _FORMATS[path.suffix.lower()]
    data = _draw(charts, kind)
    if kind == "svg":
        data = _follow_scheme(data.decode("utf-8"), _SCHEMES).encode("utf-8")
    with new_file(path) as part:
        part.write_bytes(data)


def draw_svg(chart: Chart) -> str:
    """One chart as an SVG element that is complete in itself.

    Its text and axes have the colour of the text around it.
    """
    text = _follow_scheme(_draw([chart], "svg").decode("utf-8"), "")
    return text[text.index("<svg") :]


def _follow_scheme(svg_text: str, style: str) -> str:
    """An SVG whose text and axes take the current colour; ``style`` sets that colour."""
    start = svg_text.index("<svg")
    end = svg_text.index(">", start) + 1
    head = svg_text[start:end].replace("<svg", '<svg class="qdraft-chart"', 1)
    return svg_text[:start] + head + style + svg_text[end:].replace(_INK, "currentColor")


def _draw(charts: Sequence[Chart], kind: str) -> bytes:
    require_plotting()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    settings = {
        # Text stays text: files are small, and a reader can search them.
        "svg.fonttype": "none",
        "svg.hashsalt": "qdraft",
        "text.parse_math": False,  # a file may have dollar signs in its name
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), _INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.titlecolor"), _INK),
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(6.4 * columns, 4.2 * rows), layout="constrained")
        canvas = FigureCanvasAgg(figure)
        named: list[tuple[Any, LineChart]] = []
        for i, chart in enumerate(map(_on_lines, charts)):
            axes = figure.add_subplot(rows, columns, i + 1)
            if isinstance(chart, BarChart):
                _draw_bars(axes, chart)
            else:
                _draw_lines(axes, chart)
                named.append((axes, chart))
        figure.draw_without_rendering()  # lays out the axes, which place the labels
        for axes, chart in named:
            label_points(axes, canvas.get_renderer(), chart.lines, _COLORS)
        out = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else {}
        figure.savefig(out, format=kind, dpi=110, transparent=True, metadata=metadata)
    return out.getvalue()


def _draw_bars(axes: Any, chart: BarChart) -> None:
    n = len(chart.groups)
    for i, (label, group) in enumerate(chart.groups.items()):
        low, high = (
            ends[label] if ends else (None,) * len(group) for ends in (chart.low, chart.high)
        )
        for j, (x, a, b) in enumerate(zip(group, low, high, strict=True)):
            y = j + 0.8 * ((i + 0.5) / n - 0.5)
            if x is None:
                continue
            interval = None if a is None or b is None else [[x - a], [b - x]]
            axes.barh(
                y,
                x,
                height=0.72 / n,
                color=_COLORS[i % len(_COLORS)],
                alpha=0.7,  # the interval is seen through it
                label=label if j == 0 else None,
                xerr=interval,
                capsize=3,
                error_kw={"ecolor": _INK, "elinewidth": 1},
            )
            axes.annotate(
                f"{x:.2f}",
                (x if b is None else max(x, b), y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.set_yticks(range(len(chart.names)), chart.names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(chart.names) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if chart.even is not None:
        axes.axvline(chart.even, color=_INK, linewidth=1, linestyle=":")
    _add_title(axes, chart.title, n)


def _draw_lines(axes: Any, chart: LineChart) -> None:
    for i, line in enumerate(chart.lines):
        color, dot, style = (cycle[i % len(cycle)] for cycle in (_COLORS, _DOTS, _STYLES))
        axes.plot(
            line.x, line.y, marker=dot, markersize=5, linestyle=style, color=color, label=line.label
        )
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, alpha=0.2, color=color, linewidth=0)
    if all(float(x).is_integer() for line in chart.lines for x in line.x):
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.08, y=0.12)
    if chart.mark:
        x, label = chart.mark
        axes.set_ylim(bottom=0)  # room for the label below the lines
        axes.axvline(x, color=_INK, linewidth=1, linestyle="--")
        axes.annotate(
            label, (x, 0), (4, 4), xycoords=axes.get_xaxis_transform(), textcoords="offset points"
        )
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    _add_title(axes, chart.title, len(chart.lines))


def _add_title(axes: Any, title: str, n_labels: int) -> None:
    """The title, and between it and the axes the legend if there is more than one label."""
    axes.set_title(title, loc="left", pad=24 if n_labels > 1 else 8, fontsize=11)
    if n_labels > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.0),
            ncols=3,
            frameon=False,
            fontsize=9,
            handlelength=2.6,
        )
