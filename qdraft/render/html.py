"""A study as one HTML file that opens from disk: no script, no network, charts inside.

The page and its charts follow the reader's colour scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from qdraft.paths import new_file
from qdraft.render.charts import draw_svg
from qdraft.render.foreign import dump_json, one_line
from qdraft.render.layout import LONGEST_SENTENCE
from qdraft.render.tables import Sheet, format_entry
from qdraft.study.chart_data import Chart

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { border-left: 4px solid #3a7; padding: .4rem .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #8884; }
th { font-weight: 600; } .text { text-align: left; }
.figures { display: grid; gap: 1rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; padding: .5rem; border: 1px solid #8884; }
figure svg { width: 100%; height: auto; }
pre { overflow-x: auto; font-size: .8rem; }
"""


def save_page(
    path: Path,
    title: str,
    sheets: Sequence[Sheet],
    charts: Sequence[Chart],
    words: Sequence[str],
    about: dict[str, Any] | None = None,
) -> None:
    """Write the page. ``words`` are its conclusions, ``about`` names files, settings and machine.

    Raises UsageError if the plotting library is not installed.
    """
    figures = [f"<figure>{_unique(draw_svg(chart), i)}</figure>" for i, chart in enumerate(charts)]
    body = [
        f"<h1>{_text(title)}</h1>",
        *(f'<p class="verdict">{_text(sentence)}</p>' for sentence in words),
        '<div class="figures">',
        *figures,
        "</div>",
        *map(_table, sheets),
        "<h2>Settings and machine</h2>",
        f"<pre>{escape(dump_json(about or {}, indent=1, default=str))}</pre>",
    ]
    text = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _text(text: str) -> str:
    return escape(one_line(text, LONGEST_SENTENCE))


def _table(sheet: Sheet) -> str:
    sheet = sheet.used()
    texts = [isinstance(entry, str) for entry in (sheet.rows[0] if sheet.rows else ())]
    kinds = [' class="text"' if is_text else "" for is_text in texts] or [""] * len(sheet.columns)
    head = "".join(f"<th{k}>{_text(c)}</th>" for c, k in zip(sheet.columns, kinds, strict=True))
    rows = "\n".join(
        "<tr>"
        + "".join(f"<td{k}>{escape(format_entry(x))}</td>" for x, k in zip(row, kinds, strict=True))
        + "</tr>"
        for row in sheet.rows
    )
    return (
        f"<h2>{_text(sheet.title)}</h2>\n"
        f'<div class="scroll"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    )


def _unique(chart: str, index: int) -> str:
    """An SVG whose ids no other chart of the page has."""
    return (
        chart.replace('id="', f'id="p{index}-')
        .replace('href="#', f'href="#p{index}-')
        .replace("url(#", f"url(#p{index}-")
    )
