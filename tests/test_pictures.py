"""Charts and tables of studies: in the terminal, in files, on a page."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest

from qdraft.errors import UsageError
from qdraft.render.charts import drawing, save_charts
from qdraft.render.html import save_page
from qdraft.render.tables import Sheet, as_csv, as_markdown, format_entry
from qdraft.study.chart_data import BarChart, Line, LineChart, costs_chart, line_of

CURVES = LineChart(
    "A curve", "x", "y",
    (line_of("measured", [(2, 1.0), (1, 2.0), (3, None)]), Line("other", (1, 2), (1, 1), (0, 0), (2, 2))),
    (1.5, "here"),
)  # fmt: skip
BARS = BarChart(
    "Some bars", "times", ("code", "a story"), {"achieved": (1.2, None), "predicted": (0.5, 2.0)},
    1.0, {"achieved": (1.1, None), "predicted": (None, None)},
    {"achieved": (1.3, None), "predicted": (None, None)},
)  # fmt: skip


class TestPictures:
    @pytest.mark.parametrize("chart", [CURVES, BARS], ids=["curves", "bars"])
    def test_as_text(self, chart: LineChart | BarChart) -> None:
        """Readable without colour, at 80 columns, no escape codes."""
        text = drawing(chart)
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 79
        assert chart.title in text

    def test_bars_show_their_values_and_what_is_even(self) -> None:
        lines = drawing(BARS).splitlines()
        assert any(re.search(r"code\s+#+\|#* .*1\.2$", line) for line in lines)
        assert any(re.search(r"a story\s+.*n/a$", line) for line in lines)
        assert lines[-1].endswith("| = 1")

    def test_lines_are_told_apart_by_their_marks(self) -> None:
        text = drawing(CURVES)
        assert "* measured" in text
        assert "o other" in text
        assert "here" in text

    @pytest.mark.parametrize(
        ("name", "magic"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")]
    )
    def test_files(self, tmp_path: Path, name: str, magic: bytes) -> None:
        path = tmp_path / name
        save_charts([CURVES, BARS, costs_chart({2: 1.1}, 0.4, 1)], path)
        assert path.read_bytes().startswith(magic)

    def test_other_names_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="name ends in"):
            save_charts([CURVES], tmp_path / "p.jpg")

    def test_nothing_measured(self) -> None:
        assert "nothing was measured" in drawing(LineChart("Empty", "x", "y", ()))


SHEET = Sheet(
    "a | title",
    ("name", "n", "x", "empty"),
    (("a|b", 1, 0.12345, None), ("<c>", 22, 12345.6, None)),
)


class TestSheets:
    def test_csv_has_all_digits(self) -> None:
        rows = list(csv.reader(io.StringIO(as_csv([SHEET]))))
        assert rows[0] == ["table", "name", "n", "x", "empty"]
        assert rows[1] == ["a | title", "a|b", "1", "0.12345", ""]

    def test_markdown(self) -> None:
        lines = as_markdown([SHEET]).splitlines()
        assert lines[2:] == [
            "| name | n | x |", "| --- | ---: | ---: |", "| a\\|b | 1 | 0.123 |",
            "| <c> | 22 | 12346 |",
        ]  # fmt: skip

    def test_figures(self) -> None:
        assert [format_entry(x) for x in (None, "a", 3, 0.0, 0.0001234, 1.5, 56.789)] == [
            "", "a", "3", "0.000", "1.2e-04", "1.500", "56.79",
        ]  # fmt: skip

    def test_a_page_needs_nothing_beside_itself(self, tmp_path: Path) -> None:
        path = tmp_path / "page.html"
        save_page(path, "A <title>", [SHEET], [CURVES, BARS], ["It pays & more."], {"n": 3})
        text = path.read_text(encoding="utf-8")
        assert "<script" not in text
        assert not re.findall(r'(?:src|href)="(?!#)', text.replace('xlink:href="#', 'href="#'))
        assert "http-equiv" not in text
        assert "&lt;title&gt;" in text
        assert "&lt;c&gt;" in text
        assert "It pays &amp; more." in text
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids))
        for target in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text):
            assert "".join(target) in ids
