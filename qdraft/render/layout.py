"""Labelled lines: the form of everything that is not a table."""

from __future__ import annotations

import textwrap

from rich.text import Text

_LABEL = 9  # columns
_WIDTH = 79


def line(label: str, *parts: str) -> Text:
    """One line: a label, and the parts that are not empty, separated by commas."""
    text = Text(f"{label:<{_LABEL - 1}} ", style="label")
    return text.append(", ".join(part for part in parts if part), style="default not dim")


def wrapped(label: str, sentence: str) -> list[Text]:
    """A sentence under one label, on lines of at most 79 columns."""
    first, *rest = textwrap.wrap(sentence, _WIDTH - _LABEL) or [""]
    return [line(label, first), *(line("", more) for more in rest)]
