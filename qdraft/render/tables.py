"""Tables of figures in the four forms that llama-bench has: table, csv, md and (elsewhere) json."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.render.foreign import one_line
from qdraft.render.layout import LONGEST_SENTENCE, PlainTable

Entry = str | int | float | None

FORMATS = ("table", "json", "csv", "md")


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under named columns; None is "not measured". Numbers align right, text aligns left."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]

    def used(self) -> Sheet:
        """The sheet without the columns that are empty in every row."""
        kept = [
            i
            for i in range(len(self.columns))
            if any(row[i] is not None and row[i] != "" for row in self.rows)
        ]
        return Sheet(
            self.title,
            tuple(self.columns[i] for i in kept),
            tuple(tuple(row[i] for i in kept) for row in self.rows),
        )


def format_entry(entry: Entry) -> str:
    """Format an entry for people: a number with four figures at most, text on one line."""
    if entry is None:
        return ""
    if not isinstance(entry, float):
        return one_line(str(entry))
    if entry and abs(entry) < 0.001:
        return f"{entry:.1e}"
    places = 3 if abs(entry) < 10 else 2 if abs(entry) < 100 else 1 if abs(entry) < 1000 else 0
    return f"{entry:.{places}f}"


def as_table(sheet: Sheet) -> RenderableType:
    """A table for a terminal."""
    sheet = sheet.used()
    table = PlainTable()
    for i, name in enumerate(sheet.columns):
        table.add_column(
            name, justify="right" if _is_numeric(sheet, i) else "left", overflow="fold"
        )
    for row in sheet.rows:
        table.add_row(*map(format_entry, row))
    return Group(Text(sheet.title), table) if sheet.title else table


def as_csv(sheets: Sequence[Sheet]) -> str:
    """All sheets as CSV with all digits; the first column is the title of the sheet.

    A text that a spreadsheet would take for a formula starts with an apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for sheet in sheets:
        for row in (("table", *sheet.columns), *((sheet.title, *row) for row in sheet.rows)):
            writer.writerow(_safe_cell(entry) for entry in row)
    return out.getvalue()


def _safe_cell(entry: Entry) -> Entry:
    if not isinstance(entry, str):
        return entry
    text = one_line(entry)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def as_markdown(sheets: Sequence[Sheet], sentences: Sequence[str] = ()) -> str:
    """Markdown tables, each under its title, and a paragraph for each sentence."""
    out: list[str] = []
    for sheet in map(Sheet.used, sheets):
        if sheet.title:
            out += [f"**{one_line(sheet.title)}**", ""]
        rule = ["---:" if _is_numeric(sheet, i) else "---" for i in range(len(sheet.columns))]
        body = ([format_entry(entry) for entry in row] for row in sheet.rows)
        for texts in (map(one_line, sheet.columns), rule, *body):
            out.append("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")
        out.append("")
    for sentence in sentences:
        out += [one_line(sentence, LONGEST_SENTENCE), ""]
    return "\n".join(out)


def _is_numeric(sheet: Sheet, column: int) -> bool:
    return not any(isinstance(row[column], str) for row in sheet.rows)
