"""Labelled lines, and tables without borders: the form of everything that is printed."""

from __future__ import annotations

import textwrap
from typing import Any

from rich.table import Table
from rich.text import Text

from qdraft.render.foreign import one_line

_LABEL = 9  # columns
_WIDTH = 79
LONGEST_SENTENCE = 4000  # characters, room for two paths


def line(label: str, *parts: str) -> Text:
    """One line: a label, and the parts that are not empty, separated by commas."""
    text = Text(f"{label:<{_LABEL - 1}} ", style="label")
    shown = ", ".join(one_line(part) for part in parts if part)
    return text.append(shown, style="default not dim")


def wrapped(label: str, sentence: str) -> list[Text]:
    """A sentence under one label, on lines of at most 79 columns."""
    shown = one_line(" ".join(sentence.split()), LONGEST_SENTENCE)
    first, *rest = textwrap.wrap(shown, _WIDTH - _LABEL) or [""]
    return [line(label, first), *(line("", more) for more in rest)]


class PlainTable(Table):
    """A table without borders, whose cells are text on one line."""

    def __init__(self) -> None:
        super().__init__(box=None, pad_edge=False, header_style="label")

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text(one_line(str(cell))) for cell in cells), **options)
