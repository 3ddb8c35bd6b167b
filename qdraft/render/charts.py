"""Pictures drawn: as text for the terminal, as PNG or SVG by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.paths import new_file
from qdraft.study.chart_data import Bars, Curves, Picture

_WIDTH, _HEIGHT = 78, 16
_BAR = 40  # columns of the longest bar
_MARKERS = "*o+x#"
_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


def drawing(picture: Picture) -> str:
    """A picture as text of at most 79 columns, without colour.

    Raises UsageError for curves where the plotting library is not installed.
    """
    return _bars(picture) if isinstance(picture, Bars) else _curves(picture)


def _bars(picture: Bars) -> str:
    """Each value as a bar with its figure; groups one after the other."""
    values = [x for of in picture.groups.values() for x in of if x is not None]
    most = max([*values, picture.even or 0.0]) or 1.0
    wide = max(map(len, picture.names), default=0)
    lines = [picture.title if not picture.label else f"{picture.title} ({picture.label})"]
    even = None if picture.even is None else round(_BAR * picture.even / most)
    for label, of in picture.groups.items():
        if len(picture.groups) > 1:
            lines.append(f"  {label}")
        for name, x in zip(picture.names, of, strict=True):
            bar = "" if x is None else "#" * round(_BAR * max(0.0, x) / most)
            if even is not None:  # a bar that ends before it did not reach
                bar = f"{bar:<{even}}|" if len(bar) <= even else f"{bar[:even]}|{bar[even + 1 :]}"
            told = "n/a" if x is None else f"{x:.3g}"
            lines.append(f"  {name:<{wide}} {bar:<{_BAR + 1}} {told}")
    if picture.even is not None:
        lines.append(f"  {'':<{wide}} {'':<{even or 0}}| = {picture.even:g}")
    return "\n".join(line.rstrip() for line in lines)


def _curves(picture: Curves) -> str:
    try:
        import plotext
    except ImportError as error:
        raise UsageError(
            "drawing needs plotext", hint="pip install 'qdraft[plot]', or --no-plot"
        ) from error
    lines = [line for line in picture.lines if len(line.x) > 0]
    if not lines:
        return f"{picture.title}: nothing was measured"
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(_WIDTH, _HEIGHT)
    for line, marker in zip(lines, _MARKERS, strict=False):
        signal = figure.signal(list(line.x), list(line.y), marker=marker)
        signal.label(line.label)
        signal.lines(len(line.x) > 1)
        figure.draw(signal)
    if picture.mark:
        figure.line(picture.mark[0], "v", label=picture.mark[1])
    figure.title(f"{picture.title} ({picture.y_label})")
    figure.label(picture.x_label, "x")
    text: str = figure.build().string(colorless=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def require_plotting(path: Path | None = None) -> None:
    """Raises UsageError where files cannot be drawn, or where ``path`` names no known format."""
    if path and path.suffix.lower() not in _FORMATS:
        raise UsageError(f"{path}: a picture's name ends in {', '.join(_FORMATS)}")
    if find_spec("matplotlib") is None:
        raise UsageError("pictures and reports need matplotlib", hint="pip install 'qdraft[plot]'")


def save_pictures(pictures: Sequence[Picture], path: Path) -> None:
    """All pictures (at least one) in one file, by its name. Raises UsageError as above."""
    require_plotting(path)
    kind = _FORMATS[path.suffix.lower()]
    data = _figure_bytes(pictures, kind)
    with new_file(path) as part:
        part.write_bytes(data)


def svg(picture: Picture) -> str:
    """One picture as an SVG element that needs nothing beside itself."""
    text = _figure_bytes([picture], "svg").decode("utf-8")
    return text[text.index("<svg") :]


def _figure_bytes(pictures: Sequence[Picture], kind: str) -> bytes:
    require_plotting()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = min(2, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    # Text as text: small files, and a reader can search them.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "qdraft"}):
        figure = Figure(figsize=(6.4 * columns, 4.0 * rows), layout="constrained")
        for i, picture in enumerate(pictures):
            axes = figure.add_subplot(rows, columns, i + 1)
            if isinstance(picture, Bars):
                _plot_bars(axes, picture)
            else:
                _plot_curves(axes, picture)
            axes.set_title(picture.title)
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else {})
    return out.getvalue()


def _plot_bars(axes: Any, picture: Bars) -> None:
    n = len(picture.groups)
    for i, (label, of) in enumerate(picture.groups.items()):
        places = [j + 0.8 * ((i + 0.5) / n - 0.5) for j in range(len(of))]
        values = [math.nan if x is None else x for x in of]
        errors = None
        if picture.low and picture.high:
            ends = zip(of, picture.low[label], picture.high[label], strict=True)
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
    axes.set_yticks(range(len(picture.names)), picture.names)
    axes.invert_yaxis()
    axes.set_xlabel(picture.label)
    if picture.even is not None:
        axes.axvline(picture.even, color="0.3", linewidth=1)
    if n > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _plot_curves(axes: Any, picture: Curves) -> None:
    for line in picture.lines:
        axes.plot(line.x, line.y, marker="o", markersize=4, label=line.label)
        if line.low and line.high:
            axes.fill_between(line.x, line.low, line.high, alpha=0.2)
    if picture.mark:
        axes.axvline(picture.mark[0], color="0.3", linewidth=1, linestyle="--")
        axes.text(
            picture.mark[0],
            1,
            f" {picture.mark[1]}",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    if len(picture.lines) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
