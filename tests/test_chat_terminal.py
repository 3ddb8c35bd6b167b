"""The terminal of a chat: typing, commands, answers, Ctrl-C, and input that is piped."""

from __future__ import annotations

import base64
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chatting import ChatVocab, make_chat, say
from invoke import one_error, qdraft, qdraft_process
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from qdraft.chat.chat import Chat
from qdraft.chat.transcript import find_chat, list_chats, read_chat
from qdraft.cli.chat import ChatLoop
from qdraft.cli.clipboard import copy_text
from qdraft.cli.keyboard import silent_keyboard
from qdraft.cli.options.output import RunOutputOptions
from qdraft.cli.terminal import (
    CommandCompleter,
    EditingTerminal,
    PlainTerminal,
    is_open,
    open_history,
    without_quotes,
)
from qdraft.errors import UsageError

ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"


def type_keys(keys: str, *begun: str) -> list[str | None]:
    """What the terminal reads of these keys, line by line; ``begun`` is in the first lines."""
    read: list[str | None] = []
    with create_pipe_input() as keyboard:
        keyboard.send_text(keys)
        terminal = EditingTerminal(
            lambda name: (), InMemoryHistory(), input=keyboard, output=DummyOutput()
        )
        while not read or read[-1] is not None:
            read.append(terminal.read(begun[len(read)] if len(read) < len(begun) else ""))
    return read


class TestTyping:
    @pytest.mark.parametrize(
        ("keys", "read"),
        [
            (f"hello{ENTER}", "hello"),
            (f"one{ALT_ENTER}two{ENTER}", "one\ntwo"),
            (f'"""one{ENTER}two{ENTER}"""{ENTER}', "one\ntwo"),
            (f"\x1b[200~one\ntwo\x1b[201~{ENTER}", "one\ntwo"),
            (f"away{CTRL_C}", ""),
        ],
        ids=["line", "Alt-Enter", "quotes", "paste", "Ctrl-C"],
    )
    def test_a_message(self, keys: str, read: str) -> None:
        assert type_keys(keys + CTRL_D) == [read, None]

    def test_a_text_to_edit(self) -> None:
        assert type_keys(f" two{ENTER}{CTRL_D}", "one") == ["one two", None]

    def test_only_the_user_may_read_the_history(self, tmp_path: Path) -> None:
        path = tmp_path / "data" / "history"
        history = open_history(path)
        history.append_string("secret")
        assert "secret" in path.read_text(encoding="utf-8")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert isinstance(open_history(None), InMemoryHistory)

    def test_quotes(self) -> None:
        assert is_open('"""a')
        assert is_open('"""')
        assert not is_open('"""a"""')
        assert not is_open('a """')
        assert without_quotes('"""\na\nb\n"""') == "a\nb"
        assert without_quotes('a """b"""') == 'a """b"""'

    def complete(self, text: str) -> list[str]:
        words = {"draft": ["on", "off"], "set": ["top_k", "top_p"]}
        completer = CommandCompleter(lambda name: words.get(name, []))
        found_words = completer.get_completions(Document(text, len(text)), CompleteEvent())
        return [each.text for each in found_words]

    def test_completion(self, tmp_path: Path) -> None:
        assert self.complete("/d") == ["/draft", "/drop"]
        assert self.complete("/draft o") == ["on", "off"]
        assert self.complete("/set top_") == ["top_k", "top_p"]
        assert self.complete("hello") == []
        (tmp_path / "notes.txt").touch()
        assert self.complete(f"/read {tmp_path}/no") == ["tes.txt"]

    def test_a_terminal_that_cannot_move_the_cursor(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = iter(["hello\n", '"""one\n', 'two"""\n', ""])
        monkeypatch.setattr(sys, "stdin", type("Lines", (), {"readline": lambda _: next(lines)})())
        terminal = PlainTerminal()
        assert [terminal.read() for _ in range(3)] == ["hello", "one\ntwo", None]
        assert capsys.readouterr().err == "> > . > \n"

    def test_ctrl_c_in_a_plain_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_: object) -> str:
            signal.raise_signal(signal.SIGINT)
            return "not reached\n"

        monkeypatch.setattr(sys, "stdin", type("Lines", (), {"readline": interrupted})())
        assert PlainTerminal().read() == ""


class Script:
    """A terminal on which these lines are typed; ``begun`` are the texts they began with."""

    def __init__(self, *lines: str, can_edit: bool = True) -> None:
        self._lines: Iterator[str] = iter(lines)
        self.begun: list[str] = []
        self.can_edit = can_edit

    def read(self, text: str = "") -> str | None:
        self.begun.append(text)
        return next(self._lines, None)


def talk(chat: Chat, *lines: str, **options: Any) -> Script:
    script = Script(*lines)
    ChatLoop(chat, RunOutputOptions(**options)).run(script)
    return script


class TestLoop:
    def test_answers_go_to_stdout_and_everything_else_to_stderr(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        chat = make_chat("the end", "an end")
        talk(chat, "hi", "", "/stats", "and?", "/bye", "not reached")
        shown = capsys.readouterr()
        assert shown.out == "the end\nan end\n"
        assert "8 tokens, " in shown.err
        assert ", context 13/4096, 0 reused" in shown.err
        assert ", context 26/4096, 12 reused" in shown.err
        assert "chat     1 turn, 8 tokens" in shown.err

    def test_quiet_shows_the_answers_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        talk(make_chat(), "hi", "/undo", quiet=True)
        assert capsys.readouterr() == ("the end\n", "")

    def test_every_view_fits_80_columns(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        chat = make_chat()
        views = ("/help", "/set", "/stats", "/pair", "/load", "/stats", "/save", "/think")
        talk(chat, *views[:2], "hi " * 40, *views)
        shown = capsys.readouterr().err
        assert max(map(len, shown.splitlines())) <= 80
        for word in ("/compact", "there is no answer yet", "temperature 0", "Q2_K", "hi hi hi"):
            assert word in shown or word == "there is no answer yet"

    def test_an_error_is_shown_and_the_message_is_offered_again(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        chat = make_chat(n_ctx=100)
        script = talk(chat, "x" * 100, "", "/udno", "/read nothing")
        assert script.begun == ["", "x" * 100, "", "", ""]
        shown = capsys.readouterr().err
        assert "error: the chat has 103 tokens with this message" in shown
        assert "error: there is no command /udno" in shown
        assert "error: nothing cannot be read" in shown

    def test_edit_begins_with_the_old_text(self) -> None:
        chat = make_chat()
        script = talk(chat, "old", "/edit", "/edit new")
        assert script.begun == ["", "", "/edit old", ""]
        assert chat.conversation.last_question == "new"

    def test_a_space_makes_a_command_a_message(self) -> None:
        chat = make_chat()
        talk(chat, " /help", "/etc/hosts?")
        assert [turn[0].content for turn in chat.conversation.turns] == ["/help", "/etc/hosts?"]

    def test_a_loaded_chat_shows_its_last_turn(self, capsys: pytest.CaptureFixture[str]) -> None:
        chat = make_chat()
        talk(chat, "first question", "/save kept")
        chat.close()
        talk(make_chat(), "/load kept")
        assert "> first question\nthe end\n" in capsys.readouterr().err

    def test_copy(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copied: list[str] = []
        monkeypatch.setattr("qdraft.cli.chat.copy_text", lambda text: copied.append(text) or "it")
        talk(make_chat(), "hi", "/copy")
        assert copied == ["the end"]
        assert "copied by it" in capsys.readouterr().err

    @pytest.mark.parametrize("think", ["on", "hide"])
    def test_reasoning_goes_to_stderr_or_nowhere(
        self,
        think: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(ChatVocab, "can_think", True)
        talk(make_chat("<think>why</think>because"), f"/think {think}", "hi")
        shown = capsys.readouterr()
        assert shown.out == "because\n"
        assert ("why" in shown.err) == (think == "on")


class TestStopping:
    def interrupt(self, chat: Chat, at: int, number: int = signal.SIGINT) -> None:
        """Have a signal arrive once, at the end of a round."""
        left = [number]

        def observe(round: Any) -> None:
            if round.index == at and left:
                signal.raise_signal(left.pop())

        chat.pair.observe = observe  # type: ignore[method-assign]

    def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        chat = make_chat("a long answer " * 9, "more")
        self.interrupt(chat, 2)
        talk(chat, "hi", "go on")
        first, second = chat.conversation.turns
        assert first[1].cut == "interrupted"
        assert 1 <= len(first[1].content) <= 10
        assert second[1].content == "more"
        shown = capsys.readouterr()
        assert shown.out == f"{first[1].content}\nmore\n"
        assert "stopped, " in shown.err
        assert chat.last
        assert chat.last.figures.n_reused == 5 + len(first[1].content) - 1
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_ctrl_c_before_the_first_token_takes_the_message_back(self) -> None:
        chat = make_chat()
        opened = chat.pair.open_sequences  # type: ignore[attr-defined]

        def interrupted() -> object:
            signal.raise_signal(signal.SIGINT)
            return opened()

        chat.pair.open_sequences = interrupted  # type: ignore[method-assign]
        script = talk(chat, "hi")
        assert script.begun == ["", "hi"]
        assert chat.conversation.messages == ()

    def test_another_signal_ends_the_chat_with_what_is_said(self) -> None:
        chat = make_chat("a long answer " * 9)

        def observe(round: Any) -> None:
            if round.index == 2:
                raise KeyboardInterrupt  # as SIGTERM does in a command

        chat.pair.observe = observe  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            talk(chat, "hi", "not reached")
        assert chat.conversation.messages[-1].cut == "interrupted"
        assert read_chat(find_chat()).messages == chat.conversation.messages


def test_keys_are_not_shown_while_an_answer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    termios = pytest.importorskip("termios")
    near, far = os.openpty()
    with os.fdopen(far) as terminal, os.fdopen(near):
        monkeypatch.setattr(sys, "stdin", terminal)

        def shows() -> bool:
            return bool(termios.tcgetattr(terminal.fileno())[3] & termios.ECHO)

        with silent_keyboard():
            assert not shows()
        assert shows()


class TestClipboard:
    @pytest.fixture(autouse=True)
    def _no_display(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("WAYLAND_DISPLAY", "DISPLAY", "TERMUX_VERSION"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("shutil.which", lambda name: name if name == "xclip" else None)

    def test_a_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []

        def run(command: Any, **how: Any) -> subprocess.CompletedProcess[bytes]:
            given.append((command, how["input"]))
            return subprocess.CompletedProcess(command, 0)

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setenv("DISPLAY", ":0")
        assert copy_text("\u2603") == "xclip"
        assert given == [(("xclip", "-selection", "clipboard"), "\u2603".encode())]

    def test_the_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        assert "the terminal" in copy_text("\u2603")
        code = base64.b64encode("\u2603".encode()).decode()
        assert capsys.readouterr().out == f"\x1b]52;c;{code}\x07"
        monkeypatch.setenv("TERM", "dumb")
        with pytest.raises(UsageError, match="there is no clipboard here"):
            copy_text("x")


ARGS = ("chat", "-c", "512", "-t", "1", "--temp", "0", "-n", "12", "--draft-policy", "fixed")


@pytest.mark.real
class TestReal:
    """The demo pair."""

    def test_three_turns_undo_and_retry(self, smollm2: tuple[Path, Path]) -> None:
        from qdraft import DecodeParams, EngineParams, SamplingParams, open_pair
        from qdraft.chat.settings import Settings

        sampling = SamplingParams(temperature=0)
        decode = DecodeParams(draft_policy="fixed", n_draft=3, n_predict=12)
        target, draft = smollm2
        params = EngineParams(n_ctx=512, n_threads=1)
        with open_pair(target=target, draft=draft, params=params) as pair:
            with Chat(pair, Settings(sampling, decode)) as chat:
                chat.set_system("Answer briefly.")
                n_before = 0
                for text in ("Name a colour.", "Another one.", "And a third."):
                    say(chat, text)
                    assert chat.last
                    figures = chat.last.figures
                    assert figures.n_reused == max(0, n_before - 1)
                    assert figures.n_read < 50
                    assert chat.last.generation.n_reused.draft is not None
                    n_before = figures.n_context
                whole = chat.conversation.messages
                chat.undo()
                assert chat.conversation.messages == whole[:-2]
                again = say(chat, "And a third.")
                assert again == whole[-1].content
                assert chat.last.figures.n_read == 1  # type: ignore[unreachable]
                for _ in chat.retry():
                    pass
                assert chat.conversation.messages == whole
            with pair.session() as session:
                fresh = session.generate(chat.last.generation.prompt, sampling, decode)
                assert fresh.read() == again

    def test_piped_input_is_one_turn_and_resumes(self, smollm2: tuple[Path, Path]) -> None:
        first = qdraft(*ARGS, stdin="Name a colour.\n/help\n")
        assert first.returncode == 0, first.stderr
        assert first.stdout.strip()
        assert ", context " in first.stderr
        assert [each.n_turns for each in list_chats()] == [1]
        second = qdraft(*ARGS, "--resume", "--quiet", stdin="Another one.")
        assert (second.returncode, second.stderr) == (0, "")
        read = read_chat(find_chat())
        assert [message.role for message in read.messages] == ["user", "assistant"] * 2
        assert read.messages[0].content == "Name a colour.\n/help"
        assert second.stdout.strip() == read.messages[-1].content.strip()
        third = qdraft(*ARGS, "--no-save", "-p", "Hi")
        assert third.returncode == 0
        assert len(list_chats()) == 1
        lines = find_chat().read_text(encoding="utf-8").splitlines()
        assert json.loads(lines[0])["target"] == smollm2[0].name


def test_a_chat_that_is_not_there_is_an_error_before_anything_is_loaded() -> None:
    result = qdraft("chat", "-m", "missing.gguf", "--resume", "plans", stdin="hi")
    assert one_error(result, 2) == "error: there is no chat plans"


def test_nothing_on_standard_input_is_an_error() -> None:
    result = qdraft_process("chat", "-m", "missing.gguf")
    assert one_error(result, 2) == "error: there is no message"
