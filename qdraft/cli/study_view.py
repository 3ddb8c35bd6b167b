"""How commands show a study: tables, charts, an HTML report or one JSON object."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qdraft.cli.options.output import StudyOutputOptions
from qdraft.errors import UsageError
from qdraft.render.charts import draw_text, save_charts
from qdraft.render.console import show_json, show_line, table_console
from qdraft.render.html import save_page
from qdraft.render.layout import wrapped
from qdraft.render.tables import Sheet, as_csv, as_markdown, as_table
from qdraft.study.chart_data import Chart


@dataclass(frozen=True, slots=True)
class StudyView:
    """A study, ready to be shown.

    ``report`` is the JSON object. ``doubts`` and ``conclusion`` are sentences. ``about`` names
    files, settings and machine.
    """

    title: str
    sheets: Sequence[Sheet]
    charts: Sequence[Chart]
    report: dict[str, Any]
    conclusion: Sequence[str]
    doubts: Sequence[str] = ()
    about: dict[str, Any] | None = None


def show_study(view: StudyView, output: StudyOutputOptions) -> None:
    """Print a study in the format that was asked for, and write its charts and its report."""
    sentences = (*view.doubts, *view.conclusion)
    if output.form == "json":
        show_json(view.report)
    elif output.form == "csv":
        sys.stdout.write(as_csv(view.sheets))
    elif output.form == "md":
        print(as_markdown(view.sheets, sentences))
    else:
        _print_tables(view, with_charts=not output.no_plot)
    sys.stdout.flush()
    if output.plot and view.charts:
        save_charts(view.charts, output.plot)
    elif output.plot:
        show_line("warning", f"{output.plot} is not written: there are no figures to draw")
    if output.report:
        save_page(output.report, view.title, view.sheets, view.charts, sentences, view.about)
    if not output.quiet:
        for path in filter(None, (view.charts and output.plot, output.report)):
            show_line("info", f"written to {path}")


def _print_tables(view: StudyView, *, with_charts: bool) -> None:
    console = table_console()
    for sheet in view.sheets:
        console.print(as_table(sheet))
        console.print()
    if with_charts and console.is_terminal:
        _draw_charts(view.charts)
    for label, sentences in (("doubt", view.doubts), ("verdict", view.conclusion)):
        for i, sentence in enumerate(sentences):
            console.print(*wrapped("" if i else label, sentence), sep="\n")


def _draw_charts(charts: Sequence[Chart]) -> None:
    """Draw the charts in the terminal; print only a hint if the plotting library is missing."""
    console = table_console()
    try:
        for chart in charts:
            console.print(draw_text(chart), soft_wrap=True)
            console.print()
    except UsageError as error:
        show_line("hint", f"{error}: {error.hint}")
