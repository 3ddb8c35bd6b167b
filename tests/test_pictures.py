"""Charts and tables of studies: in the terminal, in files, on a page."""

from __future__ import annotations

import csv
import io
import re
from itertools import combinations
from pathlib import Path

import pytest

from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.study_view import StudyView, show_study
from qdraft.errors import UsageError
from qdraft.render.charts import draw_svg, draw_text, save_charts
from qdraft.render.html import save_page
from qdraft.render.point_labels import label_points
from qdraft.render.tables import Sheet, as_csv, as_markdown, format_entry
from qdraft.study.chart_data import BarChart, Line, LineChart, costs_chart, line_of

CURVES = LineChart(
    "A curve",
    "width (rows)",
    "time (ms)",
    (
        line_of("measured", [(2, 1.0), (1, 2.0), (3, None)]),
        Line("other", (1, 2), (1, 1), (0, 0), (2, 2)),
    ),
    (1.5, "here"),
)
BARS = BarChart(
    "Some bars",
    "speed (times)",
    "kind of task",
    ("code", "a story"),
    {"achieved": (1.2, None), "predicted": (0.5, 2.0)},
    1.0,
    {"achieved": (1.1, None), "predicted": (None, None)},
    {"achieved": (1.3, None), "predicted": (None, None)},
)


class TestPictures:
    @pytest.mark.parametrize("chart", [CURVES, BARS], ids=["curves", "bars"])
    def test_as_text(self, chart: LineChart | BarChart) -> None:
        """Readable without colour, at 80 columns, no escape codes."""
        text = draw_text(chart)
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 79
        assert chart.title in text

    def test_bars_show_their_values_and_what_is_even(self) -> None:
        lines = draw_text(BARS).splitlines()
        assert any(re.search(r"code\s+#+\|#* .*1\.2$", line) for line in lines)
        assert any(re.search(r"a story\s+.*n/a$", line) for line in lines)
        assert lines[-1].endswith("| = 1")

    @pytest.mark.parametrize("chart", [CURVES, BARS], ids=["curves", "bars"])
    def test_both_axes_are_labelled(self, chart: LineChart | BarChart) -> None:
        for drawn in (draw_text(chart), draw_svg(chart)):
            assert chart.x_label in drawn
            assert chart.y_label in drawn

    @pytest.mark.parametrize("name", [r"a$\foo$b", "$_$", "^$$_", "100%"])
    def test_names_are_not_formulas(self, name: str) -> None:
        """A kind of a prompt file, or the name of a model, that TeX would stumble over."""
        bars = BarChart(name, name, name, (name,), {name: (1.0,)}, 1.0)
        lines = LineChart(name, name, name, (Line(name, (1, 2), (1, 2), names=(name, name)),))
        for chart in (bars, lines):
            assert name in draw_svg(chart)

    def test_lines_are_told_apart_by_their_marks(self) -> None:
        text = draw_text(CURVES)
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
        with pytest.raises(UsageError, match="name must end in"):
            save_charts([CURVES], tmp_path / "p.jpg")

    def test_points_are_named_in_text_and_in_files(self) -> None:
        chart = LineChart(
            "Named",
            "MB",
            "alpha",
            (line_of("T 0", [(2, 0.5), (1, 0.9), (3, None)], ["b", "a", "c"]),),
        )
        assert draw_text(chart).splitlines()[-1] == "  a 1, b 2"
        names = re.findall(r">([abc])</text>", draw_svg(chart))
        assert sorted(names) == ["a", "b"]

    @pytest.mark.parametrize("n", [3, 12])
    def test_names_cover_neither_each_other_nor_points(self, n: int) -> None:
        """Points as near to each other as the rungs of a ladder are."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        x = tuple(float(i) for i in range(n))
        lines = tuple(
            Line(
                f"T {t}", x, tuple(0.9 + t / 50 + i / 300 for i in range(n)), names=("Q4_K_M",) * n
            )
            for t in (0, 1)
        )
        figure = Figure(figsize=(6.4, 4.2))
        canvas = FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for line in lines:
            axes.plot(line.x, line.y)
        figure.draw_without_rendering()
        label_points(axes, canvas.get_renderer(), lines, ("red", "blue"))
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
        assert len(boxes) == 2 * n
        dots = [
            axes.transData.transform(at)
            for line in lines
            for at in zip(line.x, line.y, strict=True)
        ]
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
        assert not any(box.contains(*dot) for box in boxes for dot in dots)

    def test_an_svg_follows_the_colours_of_its_page(self, tmp_path: Path) -> None:
        """Text and axes have the colour of the text around them, and there is no background."""
        path = tmp_path / "p.svg"
        save_charts([CURVES, BARS], path)
        for text in (draw_svg(CURVES), path.read_text(encoding="utf-8")):
            assert "currentColor" in text
            assert "#ffffff" not in text
        assert "prefers-color-scheme:dark" in path.read_text(encoding="utf-8")

    def test_nothing_measured(self) -> None:
        assert "nothing was measured" in draw_text(LineChart("Empty", "x", "y", ()))


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

    def test_csv_holds_no_formulas(self) -> None:
        """A spreadsheet takes these for formulas, which may run programs."""
        texts = ("=1+1", "+a", "-b", "@c", "e=f")
        rows = [*csv.reader(io.StringIO(as_csv([Sheet("=t", texts, ((*texts,), (-1, -0.5)))])))]
        assert rows[0] == ["table", "'=1+1", "'+a", "'-b", "'@c", "e=f"]
        assert rows[1] == ["'=t", *rows[0][1:]]
        assert rows[2] == ["'=t", "-1", "-0.5"]

    def test_markdown(self) -> None:
        lines = as_markdown([SHEET]).splitlines()
        assert lines[2:] == [
            "| name | n | x |",
            "| --- | ---: | ---: |",
            "| a\\|b | 1 | 0.123 |",
            "| <c> | 22 | 12346 |",
        ]

    def test_figures(self) -> None:
        assert [format_entry(x) for x in (None, "a", 3, 0.0, 0.0001234, 1.5, 56.789)] == [
            "",
            "a",
            "3",
            "0.000",
            "1.2e-04",
            "1.500",
            "56.79",
        ]

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


def test_a_study_without_figures_says_that_it_draws_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If every rung of a comparison failed, --plot was silent."""
    path = tmp_path / "p.svg"
    output = StudyOutputOptions(plot=path, quiet=True)
    show_study(StudyView("qdraft compare", [], [], {}, []), output)
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"warning: {path} is not written: there are no figures to draw"
    assert not path.exists()
