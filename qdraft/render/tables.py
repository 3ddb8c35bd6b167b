"""Tables of figures in the four forms that llama-bench has: table, csv, md and (elsewhere) json."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Cell = str | int | float | None

FORMATS = ("table", "json", "csv", "md")


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows under named columns; None is "not measured". Numbers stand right, text left."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def used(self) -> Sheet:
        """Without the columns that no row has anything in."""
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


def told(cell: Cell) -> str:
    """A cell for people: four figures at most."""
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    if cell and abs(cell) < 0.001:
        return f"{cell:.1e}"
    places = 3 if abs(cell) < 10 else 2 if abs(cell) < 100 else 1 if abs(cell) < 1000 else 0
    return f"{cell:.{places}f}"


def as_table(sheet: Sheet) -> RenderableType:
    """For a terminal."""
    sheet = sheet.used()
    table = Table(box=None, pad_edge=False, header_style="label")
    for i, name in enumerate(sheet.columns):
        table.add_column(name, justify="right" if _numeric(sheet, i) else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(told(cell)) for cell in row))
    return Group(Text(sheet.title), table) if sheet.title else table


def as_csv(sheets: Sequence[Sheet]) -> str:
    """All digits; the name of the sheet is the first column where there are several."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for sheet in sheets:
        writer.writerow(["table", *sheet.columns])
        writer.writerows([sheet.title, *row] for row in sheet.rows)
    return out.getvalue()


def as_markdown(sheets: Sequence[Sheet]) -> str:
    """Markdown tables, each under its title."""
    out: list[str] = []
    for sheet in map(Sheet.used, sheets):
        rule = ["---:" if _numeric(sheet, i) else "---" for i in range(len(sheet.columns))]
        if sheet.title:
            out += [f"**{sheet.title}**", ""]
        for cells in (sheet.columns, rule, *([told(cell) for cell in row] for row in sheet.rows)):
            out.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
        out.append("")
    return "\n".join(out)


def _numeric(sheet: Sheet, column: int) -> bool:
    return not any(isinstance(row[column], str) for row in sheet.rows)
