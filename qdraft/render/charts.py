"""Charts drawn: as text for the terminal, as PNG or SVG by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.paths import new_file
from qdraft.study.chart_data import BarChart, Chart, LineChart

_WIDTH, _HEIGHT = 78, 16
_BAR = 40  # columns of the longest bar
_MARKERS = "*o+x#"
_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


def drawing(chart: Chart) -> str:
    """A chart as text of at most 79 columns, without colour.

    Raises UsageError for curves where the plotting library is not installed.
    """
    return _bars(chart) if isinstance(chart, BarChart) else _curves(chart)


def _bars(chart: BarChart) -> str:
    """Each value as a bar with its figure; groups one after the other."""
    values = [x for of in chart.groups.values() for x in of if x is not None]
    most = max([*values, chart.even or 0.0]) or 1.0
    wide = max(map(len, chart.names), default=0)
    lines = [chart.title if not chart.x_label else f"{chart.title} ({chart.x_label})"]
    even = None if chart.even is None else round(_BAR * chart.even / most)
    for label, of in chart.groups.items():
        if len(chart.groups) > 1:
            lines.append(f"  {label}")
        for name, x in zip(chart.names, of, strict=True):
            bar = "" if x is None else "#" * round(_BAR * max(0.0, x) / most)
            if even is not None:  # a bar that ends before it did not reach
                bar = f"{bar:<{even}}|" if len(bar) <= even else f"{bar[:even]}|{bar[even + 1 :]}"
            told = "n/a" if x is None else f"{x:.3g}"
            lines.append(f"  {name:<{wide}} {bar:<{_BAR + 1}} {told}")
    if chart.even is not None:
        lines.append(f"  {'':<{wide}} {'':<{even or 0}}| = {chart.even:g}")
    return "\n".join(line.rstrip() for line in lines)


def _curves(chart: LineChart) -> str:
    try:
        import plotext
    except ImportError as error:
        raise UsageError(
            "drawing needs plotext", hint="pip install 'qdraft[plot]', or --no-plot"
        ) from error
    lines = [line for line in chart.lines if len(line.x) > 0]
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
    figure.title(f"{chart.title} ({chart.y_label})")
    figure.label(chart.x_label, "x")
    text: str = figure.build().string(colorless=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def require_plotting(path: Path | None = None) -> None:
    """Raises UsageError where files cannot be drawn, or where ``path`` names no known format."""
    if path and path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: a chart's name ends in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError("charts and reports need matplotlib", hint="pip install 'qdraft[plot]'")


def save_charts(charts: Sequence[Chart], path: Path) -> None:
    """All charts (at least one) in one file, by its name. Raises UsageError as above."""
    require_plotting(path)
    kind = _FORMATS[path.suffix.lower()]
    data = _figure_bytes(charts, kind)
    with new_file(path) as part:
        part.write_bytes(data)


def svg(chart: Chart) -> str:
    """One chart as an SVG element that needs nothing beside itself."""
    text = _figure_bytes([chart], "svg").decode("utf-8")
    return text[text.index("<svg") :]


def _figure_bytes(charts: Sequence[Chart], kind: str) -> bytes:
    require_plotting()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    # Text as text: small files, and a reader can search them.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qdraft"}):
        figure = Figure(figsize=(6.4 * columns, 4.0 * rows), layout="constrained")
        for i, chart in enumerate(charts):
            axes = figure.add_subplot(rows, columns, i + 1)
            if isinstance(chart, BarChart):
                _plot_bars(axes, chart)
            else:
                _plot_curves(axes, chart)
            axes.set_title(chart.title)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def _plot_bars(axes: Any, chart: BarChart) -> None:
    n = len(chart.groups)
    for i, (label, of) in enumerate(chart.groups.items()):
        places = [j + 0.8 * ((i + 0.5) / n - 0.5) for j in range(len(of))]
        values = [math.nan if x is None else x for x in of]
        errors = None
        if chart.low and chart.high:
            ends = zip(of, chart.low[label], chart.high[label], strict=True)
            errors = list(
                zip(
                    *[
                        (0.0, 0.0) if x is None or a is None or b is None else (x - a, b - x)
                        for x, a, b in ends
                    ],
                    strict=True,
                )
            )
        axes.barh(places, values, height=0.72 / n, label=label, xerr=errors, capsize=3)
    axes.set_yticks(range(len(chart.names)), chart.names)
    axes.invert_yaxis()
    axes.set_xlabel(chart.x_label)
    if chart.even is not None:
        axes.axvline(chart.even, color="0.3", linewidth=1)
    if n > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _plot_curves(axes: Any, chart: LineChart) -> None:
    for line in chart.lines:
        axes.plot(line.x, line.y, marker="o", markersize=4, label=line.label)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, alpha=0.2)
    if chart.mark:
        axes.axvline(chart.mark[0], color="0.3", linewidth=1, linestyle="--")
        axes.text(
            chart.mark[0],
            1,
            f" {chart.mark[1]}",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if len(chart.lines) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
