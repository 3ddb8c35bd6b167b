"""What people see, at a fixed width: the summary, the check, the styled stream."""

from __future__ import annotations

import io
import logging

import pytest
from fakes import PROMPT_ROUND as PROMPT
from fakes import make_round as make
from rich.console import Console

from qdraft.decoding.records import Chunk, FinishReason, Origin
from qdraft.decoding.summary import summarize
from qdraft.render.console import THEME, LogToTalk, TextStream
from qdraft.render.progress import ProgressBars
from qdraft.render.run import check_view, summary_view
from qdraft.session.check import Check


def console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, theme=THEME, width=80, highlight=False
    )


def content(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def printed(view: object) -> str:
    out = console()
    out.print(view)
    return content(out)


def test_summary_fits_80_columns() -> None:
    lost = [PROMPT, make(0, 0)] + [make(2, 0, draft_s=0.5, verify_s=1.5)] * 9
    assert printed(summary_view(summarize(lost, 1.5), FinishReason.LENGTH, 7)) == (
        "text     11 tokens, length reached, prompt 5 tokens, seed 7\n"
        "speed    0.5 t/s, first token after 1.50 s\n"
        "draft    alpha 0.000, draft yield 0.000, tau 1.00, 9 of 11 rounds\n"
        "accepted  0 ######################## 9\n"
        "time     draft 4.50 s, verify 14.50 s, other 0.00 s\n"
        "verdict  0.53 times the target alone (1.0 t/s): a draft token costs 0.25 target\n"
        "         tokens, 3 rows cost 1.50; n_draft 2 pays off from alpha 0.62, here it\n"
        "         is 0.00\n"
    )


@pytest.mark.parametrize("reason", FinishReason)
def test_an_empty_summary(reason: FinishReason) -> None:
    assert "0 tokens" in printed(summary_view(summarize([]), reason, None))


def test_check_lines() -> None:
    same = check_view(Check(True, True, None, None, 0.5))
    assert printed(same) == "check    same as the target alone, measured noise 0.5\n"
    numerics = printed(check_view(Check(False, True, 9, 0.1, 0.5)))
    assert "forked at token 9, margin 0.1, measured noise 0.5" in numerics
    assert "numerics explain it" in " ".join(numerics.split())
    bug = printed(check_view(Check(False, True, 9, 3.0, 0.5)))
    assert "numerics do not explain it: a bug" in " ".join(bug.split())


CHUNKS = [
    Chunk("a\tb", 1, Origin.TARGET, 0),
    Chunk("\r\n\f🦙", 2, Origin.DRAFT, 1),
    Chunk("[bold]x[/]", 3, Origin.BONUS, 1),
    Chunk(" y", 4, Origin.RESIDUAL, 2),
]
TEXT = "".join(chunk.text for chunk in CHUNKS)


@pytest.mark.parametrize(("color", "terminal"), [(False, False), (False, True), (True, False)])
def test_the_stream_is_exactly_the_text(color: bool, terminal: bool) -> None:
    out = console(terminal=terminal)
    stream = TextStream(color=color, console=out)
    for chunk in CHUNKS[:-1]:
        stream.write(chunk)
    stream.end(TEXT)  # the last chunk was not delivered: an interrupt
    assert content(out) == TEXT + "\n"


def test_origins_are_told_apart_on_a_terminal() -> None:
    out = console(terminal=True)
    stream = TextStream(color=True, console=out)
    for chunk in CHUNKS:
        stream.write(chunk)
    written = content(out)
    assert "\x1b[1ma\tb\x1b[0m" in written
    assert "\x1b[32m" in written
    assert "🦙" in written
    assert "\x1b[4;36m[bold]x[/]\x1b[0m" in written
    assert "\x1b[7;33m y\x1b[0m" in written


def test_no_color_keeps_only_what_is_not_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = console(terminal=True)
    TextStream(color=True, console=out).write(CHUNKS[2])
    assert content(out) == "\x1b[4m[bold]x[/]\x1b[0m"


def test_names_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars() as bars:
        bars.report("building pair[test]-F16.gguf", 1, 2)
        bars.report("loading pair[test]-F16.gguf", 0.5, 1)
    assert capsys.readouterr().err == "building pair[test]-F16.gguf\n"


@pytest.mark.parametrize("held", [True, False])
def test_log_lines_do_not_stand_in_the_middle_of_a_text(
    monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """A warning of slow decodes was printed into the text, if both go to one terminal."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return held

    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    stream = TextStream(raw=True, console=Console(file=screen, color_system=None))
    log = logging.getLogger("qdraft")
    log.addHandler(handler := LogToTalk())
    try:
        log.warning("before")
        stream.write(Chunk("one ", 1, Origin.TARGET, 0))
        log.warning("meanwhile")
        stream.write(Chunk("text", 2, Origin.TARGET, 0))
        stream.end("one text")
        log.warning("after")
    finally:
        log.removeHandler(handler)
    lines = screen.getvalue().splitlines()
    assert lines[0] == "warning: before"
    assert lines[-1] == "warning: after"
    if held:
        assert lines[1:-1] == ["one text", "warning: meanwhile"]
    else:
        assert "one warning: meanwhile" in lines
