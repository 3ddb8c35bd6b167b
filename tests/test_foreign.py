"""Text from outside, which never reaches a terminal, a page or a table as it is."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from invoke import qdraft
from rich.console import Group
from rich.text import Text

from qdraft.decoding.records import Chunk, Origin
from qdraft.render.charts import draw_svg, draw_text
from qdraft.render.console import (
    THEME,
    LogToTalk,
    SafeConsole,
    TextStream,
    show_json,
    show_line,
    talk_console,
)
from qdraft.render.foreign import dump_json, escape, escape_controls, one_line
from qdraft.render.html import save_page
from qdraft.render.layout import PlainTable, line, wrapped
from qdraft.render.progress import ProgressBars
from qdraft.render.tables import Sheet, as_csv, as_markdown, as_table
from qdraft.study.chart_data import BarChart, Line, LineChart

# A title, the clipboard, a cleared screen, C1, a text that runs backwards, a hidden text, a bell.
HOSTILE = "x\x1b]52;c;aGk=\x1b\\\x9b2J\x1b[1A\u202egnp\u200b\U000e0041\x07\x08\x7f\r<b>|$\\frac$y"
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\x00\x07\x7f\x9b", "\\x00\\x07\\x7f\\x9b"),
        ("\u202e\u2066\u200b\ufeff\u2028", "\\u202e\\u2066\\u200b\\ufeff\\u2028"),
        ("\U000e0041\u3164", "\\U000e0041\\u3164"),
        ("\udcff", "\\xff"),  # a file name that is not UTF-8
        ("naïve 日本語 🦙 C:\\x\n\ty", "naïve 日本語 🦙 C:\\x\n\ty"),
    ],
)
def test_what_cannot_be_seen_is_shown(text: str, shown: str) -> None:
    assert escape(text) == shown
    assert escape(shown) == shown


def test_names_are_cut_to_one_line() -> None:
    assert one_line("a\nb\tc") == "a\\nb\\tc"
    assert one_line("n" * 10**6) == "n" * 300 + "..."


def test_a_console_shows_control_characters_wherever_they_are() -> None:
    """The styles of qdraft itself remain."""
    out = io.StringIO()
    console = SafeConsole(file=out, theme=THEME, force_terminal=True, width=60)
    table = PlainTable()
    table.add_column(HOSTILE)
    table.add_row(HOSTILE, style="red")
    console.print(Group(Text(HOSTILE, style="bold"), table, line(HOSTILE, HOSTILE)))
    console.print(HOSTILE, *wrapped("label", HOSTILE))
    styled = out.getvalue()
    assert "\x1b[1mx\\x1b]52;c;aGk=" in styled
    assert not RAW.search(re.sub(r"\x1b\[[\d;]*m", "", styled))


def test_lines_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors, warnings, llama.cpp's log and progress."""
    show_line("error", HOSTILE)
    for name in ("qdraft.x", "qdraft.llama.cpp.y"):
        LogToTalk().emit(logging.LogRecord(name, 30, "", 0, "%s", (HOSTILE,), None))
    with ProgressBars() as bars:
        bars.report(f"{HOSTILE}\n", 1, 2)
    talk_console().print(HOSTILE)
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 5
    assert shown.count("x\\x1b]52") == 5
    assert not RAW.search(shown)


def test_json_keeps_the_value(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"name": HOSTILE})
    printed = capsys.readouterr().out
    assert not RAW.search(printed)
    assert json.loads(printed) == {"name": HOSTILE}
    assert json.loads(dump_json(["é\udcff\U000e0041"])) == ["é\udcff\U000e0041"]
    assert dump_json(["é日"]) == '["é日"]'


def test_a_text_on_a_terminal() -> None:
    """A model writes to the clipboard; joiners of emoji and marks of direction are usual text."""
    pieces = ["a\x1b", "]52;c;aGk=\x07", "\x9b2J\r", "b\r\n\tc", "👩\u200d🚀\u202e\u200f"]
    shown = "a\\x1b]52;c;aGk=\\x07\\x9b2J\\x0db\n\tc👩\u200d🚀\\u202e\u200f"
    for terminal, raw, expected in (
        (True, False, shown),
        (True, True, "".join(pieces)),
        (False, False, "".join(pieces)),
    ):
        out = Terminal(newline="") if terminal else io.StringIO(newline="")
        stream = TextStream(raw=raw, console=SafeConsole(file=out))
        for piece in pieces[:-1]:
            stream.write(Chunk(piece, 1, Origin.TARGET, 0))
        stream.end("".join(pieces))
        assert out.getvalue() == expected + "\n"
    assert escape_controls("x" * 50) == "x" * 50


def test_tables_and_pages(tmp_path: Path) -> None:
    sheet = Sheet(HOSTILE, (HOSTILE, "n"), ((HOSTILE, 1.5),))
    out = io.StringIO()
    SafeConsole(file=out, theme=THEME).print(as_table(sheet))
    name = "\x1b]52\u202e<b>$\\frac$"  # short: there is little room in a chart
    bars = BarChart(name, name, name, (name,), {name: (1.0,), "two": (2.0,)})
    curve = Line(name, (1.0, 2.0), (1.0, 2.0), names=(name, "b"))
    lines = LineChart(name, name, name, (curve, curve), (1.5, name))
    texts = [out.getvalue(), as_csv([sheet]), as_markdown([sheet], [HOSTILE])]
    texts += [draw(chart) for draw in (draw_text, draw_svg) for chart in (bars, lines)]
    page = tmp_path / "page.html"
    save_page(page, HOSTILE, [sheet], [], [HOSTILE], {"file": HOSTILE})
    texts.append(page.read_text(encoding="utf-8"))
    assert [RAW.search(text) for text in texts] == [None] * 8
    assert all("\\x1b]52" in text for text in texts)
    assert not any("<b>" in text for text in texts[-3:])


def hostile_file(path: Path) -> Path:
    """A header whose every text is hostile."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(HOSTILE)
    writer.add_block_count(1)
    writer.add_tokenizer_model(HOSTILE)
    writer.add_token_list(["a", HOSTILE])
    writer.add_chat_template(f"{{# {HOSTILE} #}}")
    writer.add_tensor("token_embd.weight", np.zeros((2, 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((32, 32), dtype=np.float32))
    writer.add_description("d" * 10**6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_names_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qdraft.pairs.scan._MODEL_BYTES", 0)
    path = hostile_file(tmp_path / "h\x1b[31m.gguf")
    for args in (["inspect", path], ["inspect", path, path], ["models", "scan", tmp_path]):
        for more in ([], ["--json"]):
            shown = qdraft(*map(str, args), *more)
            assert shown.returncode == 0, shown.stderr
            assert not RAW.search(shown.stdout + shown.stderr)
            assert "1b]52;c;aGk=" in shown.stdout
    assert not RAW.search(qdraft("run", "-m", str(path), "-p", "x").stderr)


def test_names_in_models_yaml(tmp_path: Path) -> None:
    text = json.dumps(HOSTILE)
    path = tmp_path / "models.yaml"
    entry = f"target: {text}, description: {text}, license: {text}, tuned: {{{text}: {text}}}"
    path.write_text(f"pairs: {{p: {{{entry}}}, {text}: {{target: a.gguf}}}}\n", encoding="utf-8")
    for args in (["list"], ["show", "p"], ["show", HOSTILE], ["remove", HOSTILE]):
        result = qdraft("models", *args, "--models-file", str(path))
        assert not RAW.search(result.stdout + result.stderr)
        assert result.stdout + result.stderr
