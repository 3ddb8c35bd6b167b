"""How every study is shown: tables, charts, a report, one JSON object; figures on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qdraft.errors import UsageError
from qdraft.render.charts import drawing, require_plotting, save_charts
from qdraft.render.console import show_json, show_line, table_console
from qdraft.render.html import save_page
from qdraft.render.summary import wrapped
from qdraft.render.tables import FORMATS, Sheet, as_csv, as_markdown, as_table
from qdraft.study.chart_data import Chart


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a study is shown, and where it goes."""

    output: str
    as_json: bool
    quiet: bool
    plot: Path | None
    no_plot: bool
    report: Path | None

    def __post_init__(self) -> None:
        if self.output not in FORMATS:
            raise UsageError(f"-o is {self.output}, but must be one of {', '.join(FORMATS)}")
        if self.as_json and self.output not in ("table", "json"):
            raise UsageError("--json and another output format (-o) do not go together")
        if self.plot and self.no_plot:
            raise UsageError("--plot and --no-plot do not go together")
        for path in (self.plot, self.report):
            if path and not path.absolute().parent.is_dir():
                raise UsageError(f"{path.parent} is no folder")
        if self.plot or self.report:  # known before anything is measured
            require_plotting(self.plot)

    @property
    def form(self) -> str:
        return "json" if self.as_json else self.output


def show_study(
    title: str,
    sheets: Sequence[Sheet],
    charts: Sequence[Chart],
    report: dict[str, Any],
    doubts: Sequence[str],
    verdict: Sequence[str],
    shown: Shown,
    about: dict[str, Any] | None = None,
) -> None:
    """Print a study in the form asked for, and write its charts and its report.

    ``doubts`` and ``verdict`` are sentences, ``about`` names files, settings and machine.
    """
    if shown.form == "json":
        show_json(report)
    elif shown.form == "csv":
        sys.stdout.write(as_csv(sheets))
    elif shown.form == "md":
        print(as_markdown(sheets) + "\n".join(f"{x}\n" for x in (*doubts, *verdict)))
    else:
        out = table_console()
        for sheet in sheets:
            out.print(as_table(sheet))
            out.print()
        if not shown.no_plot and out.is_terminal:
            _draw(charts)
        for label, sentences in (("doubt", doubts), ("verdict", verdict)):
            for i, sentence in enumerate(sentences):
                out.print(*wrapped("" if i else label, sentence), sep="\n")
    sys.stdout.flush()
    if shown.plot and charts:
        save_charts(charts, shown.plot)
    if shown.report:
        save_page(shown.report, title, sheets, charts, (*doubts, *verdict), about)
    if not shown.quiet:
        for path in filter(None, (charts and shown.plot, shown.report)):
            show_line("info", f"written: {path}")


def _draw(charts: Sequence[Chart]) -> None:
    """In the terminal; where the library is missing the figures stand alone."""
    out = table_console()
    try:
        for chart in charts:
            out.print(drawing(chart), soft_wrap=True)
            out.print()
    except UsageError as error:
        show_line("hint", f"{error}: {error.hint}")
