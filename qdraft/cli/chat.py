"""`qdraft chat`: a conversation with a pair."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qdraft.chat.answer import Answer
from qdraft.chat.chat import Chat
from qdraft.chat.commands import COMMANDS, Effect, describe_load, parse
from qdraft.chat.commands import run as run_command
from qdraft.chat.settings import Settings
from qdraft.chat.transcript import Transcript, find_chat, list_chats, new_path
from qdraft.cli.clipboard import copy_text
from qdraft.cli.keyboard import silent_keyboard
from qdraft.cli.opening import open_described
from qdraft.cli.options.chat import ChatOptions
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import Without, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import RunOutputOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.template import ChatTemplateOptions
from qdraft.cli.options.text import TextOptions
from qdraft.cli.pair_command import PairCommand
from qdraft.cli.run import INTERRUPTED, refuse_combinations, with_progress
from qdraft.errors import QDraftError, UsageError
from qdraft.paths import data_dir
from qdraft.render.chat import (
    answer_line,
    chats_view,
    greeting_view,
    help_view,
    pair_view,
    settings_view,
    stats_view,
    turn_view,
)
from qdraft.render.console import TextStream, show_line, talk_console

if TYPE_CHECKING:
    from qdraft.cli.terminal import Terminal


class ChatCommand(PairCommand):
    """Takes ``--resume`` with or without the name of a chat."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        return super().make_context(info_name, _with_names(args), parent, **extra)


def _with_names(args: Sequence[str]) -> list[str]:
    """Return the words with an empty name after each ``--resume`` that has none."""
    words: list[str] = []
    for i, word in enumerate(args):
        words.append(word)
        follows = args[i + 1] if i + 1 < len(args) else "-"
        if word == "--resume" and follows.startswith("-"):
            words.append("")
    return words


@takes_options
def chat(  # noqa: PLR0913 (one group of options each)
    models: ModelOptions,
    chats: ChatOptions,
    text: Annotated[TextOptions, Without("raw", "special", "ignore_eos")],
    template: ChatTemplateOptions,
    sampling: SamplingOptions,
    drafting: DraftingOptions,
    devices: DeviceOptions,
    output: Annotated[RunOutputOptions, Without("as_json", "check", "logprobs")],
) -> None:
    """Chat with a model.

    The draft proposes tokens and the target verifies them, so the answers are exactly the target's.
    Both keep what was said in their caches: an answer waits for the new message alone. /help lists
    the commands of a chat.

    Text on standard input, and the prompt of -p or -f, is one turn. Only a chat in a terminal goes
    on after it.

    qdraft saves each turn as it happens, in the chats folder of your data directory.
    """
    params = drafting.params(n_predict=text.n_predict, seed=sampling.seed, stop=text.stops())
    sampling.params()  # raises before anything is loaded
    refuse_combinations(models, drafting, devices)
    output.set_log_levels()
    devices.engines()
    template_text = template.template_text()
    first = None
    is_interactive = sys.stdin is not None and sys.stdin.isatty()
    if not is_interactive or text.prompt is not None or text.file is not None:
        first = text.read_prompt()
        if not first.strip():
            raise UsageError("there is no message", hint="start qdraft chat in a terminal")
    resumed = None if chats.resume is None else find_chat(chats.resume)
    keep_draft = drafting.kind.requires_draft
    with open_described(
        models,
        devices,
        drafting,
        keep_draft=keep_draft,
        quiet=output.quiet,
        template=template_text,
    ) as pair:
        if not models.no_draft:
            params = pair.choose_drafter(params)
        settings = Settings(
            sampling.params(pair.recommended.values),
            params,
            "draft" if output.color else "off",
            think_of(template),
        )
        names = {"target": pair.target.path.name, "draft": pair.draft and pair.draft.path.name}
        transcript = None if chats.no_save else Transcript(new_path(), names)
        with Chat(
            pair,
            settings,
            transcript,
            template=template.for_model(pair.vocab),
            split_reasoning=template.splits,
            parse_special=bool(text.parse_special),
        ) as talk:
            loop = ChatLoop(talk, output)
            if not output.quiet and is_interactive:
                loop.greet()
            if resumed:
                loop.resume(resumed, keep=not chats.no_save, show=is_interactive)
            if (system := text.system_message()) is not None:
                talk.set_system(system)
            status = loop.answer(talk.ask(first)) if first is not None else 0
            if is_interactive:
                from qdraft.cli.terminal import open_terminal  # takes long to import

                history = None if chats.no_save else data_dir() / "chat-history"
                loop.run(open_terminal(loop.words, history))
                loop.part()
            raise typer.Exit(status)


def think_of(template: ChatTemplateOptions) -> str:
    """Return the setting of ``/think`` that the options ask for."""
    if template.reasoning == "off":
        return "off"
    return "hide" if template.hide_reasoning else "on"


class ChatLoop:
    """Questions, commands and answers of a chat, until the user leaves."""

    def __init__(self, chat: Chat, output: RunOutputOptions) -> None:
        self._chat = chat
        self._output = output
        self._next = ""  # the text that the next line begins with

    def run(self, terminal: Terminal) -> None:
        """Read lines and do what they ask for, until the end."""
        self._next = self._next or self._chat.unsent
        while True:
            begun, self._next = self._next, ""
            if begun and not terminal.can_edit:
                talk_console().print(begun, style="label")
            line = terminal.read(begun)
            if line is None:
                return
            if not line.strip():
                continue
            try:
                if self._take(line).leave:
                    return
            except (QDraftError, OSError) as error:
                _show_error(error)
                self._next = self._next or ("" if parse(line) else line)

    def words(self, name: str) -> Sequence[str]:
        """Return words that the argument of a command may be."""
        if name == "set":
            return list(self._chat.settings.values())
        if name == "load":
            return [saved.name for saved in list_chats()]
        command = COMMANDS.get(name)
        return command.values if command else ()

    def greet(self) -> None:
        """Say what was loaded."""
        talk_console().print(greeting_view(self._chat.pair, self._chat.n_ctx))

    def resume(self, path: Path, *, keep: bool, show: bool) -> None:
        """Load a chat, and with ``show`` print where it stands."""
        self._say(describe_load(self._chat, path, keep=keep))
        if show:
            self._show_last_turn()

    def part(self) -> None:
        """Say how to go on with this chat later."""
        transcript = self._chat.transcript
        if transcript and transcript.is_begun:
            self._say(f"saved: qdraft chat --resume {transcript.name}")

    def answer(self, answer: Answer) -> int:
        """Stream an answer, and show its line; return the exit status.

        Ctrl-C stops it. Another signal that stops the command is raised again.
        """
        settings = self._chat.settings
        stream = TextStream(
            color=settings.colour == "draft",
            raw=self._output.raw_output,
            reasoning=settings.think == "on" and not self._output.quiet,
        )
        stopping = Stopping(answer)
        try:
            with stopping, silent_keyboard():
                chunks = with_progress(self._chat.pair, answer, quiet=self._output.quiet)
                for chunk in chunks:
                    stream.write(chunk)
        except KeyboardInterrupt:
            if not stopping.presses:
                raise
        finally:
            answer.end()
            stream.end(answer.text)
        if answer.has_begun and not self._output.quiet:
            talk_console().print(answer_line(answer.figures))
        return INTERRUPTED if stopping.presses else 0

    def _take(self, line: str) -> Effect:
        """Do what a line asks for."""
        command = parse(line)
        if command is None:
            self._ask(line.removeprefix(" ") if line.startswith(" /") else line)
            return Effect()
        effect = run_command(self._chat, *command)
        if effect.answer:
            self.answer(effect.answer)
        if effect.edit is not None:
            self._next = f"/edit {effect.edit}"
        if effect.copy is not None:
            self._say(f"copied by {copy_text(effect.copy)}")
        if effect.show:
            self._show(effect.show)
        if effect.say:
            self._say(effect.say)
        if command[0] == "load" and effect.say:
            self._next = self._chat.unsent
            self._show_last_turn()
        return effect

    def _ask(self, text: str) -> None:
        answer = self._chat.ask(text)
        self._chat.unsent = ""
        self.answer(answer)
        if not answer.has_begun:  # nothing came of it, so the chat is without it
            self._next = text

    def _show(self, view: str) -> None:
        chat = self._chat
        views = {
            "help": lambda: help_view(COMMANDS.values()),
            "settings": lambda: settings_view(chat.settings),
            "stats": lambda: stats_view(chat.last, chat),
            "pair": lambda: pair_view(chat.pair, chat.n_ctx),
            "chats": lambda: chats_view(list_chats()),
        }
        talk_console().print(views[view]())

    def _show_last_turn(self) -> None:
        turn = self._chat.conversation
        if not self._output.quiet and turn.last_question is not None:
            talk_console().print(turn_view(turn.last_question, turn.last_answer or ""))

    def _say(self, line: str) -> None:
        if not self._output.quiet:
            talk_console().print(line, style="label", soft_wrap=False)


class Stopping:
    """During the block, Ctrl-C stops an answer; ``presses`` counts how often it was pressed.

    The first press waits for the round that is under way, so that the caches stay whole. Before
    the first token, and at the second press, it is KeyboardInterrupt.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._old: Any = None
        self.presses = 0

    @property
    def waits(self) -> bool:
        """Tell whether a press now lets a native call go on; see ``llama.interrupts``."""
        return self._answer.has_begun and not self.presses

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        waits = self.waits
        self.presses += 1
        if not waits:
            raise KeyboardInterrupt
        self._answer.stop()

    def __enter__(self) -> Stopping:
        self._old = signal.signal(signal.SIGINT, self)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._old)


def _show_error(error: QDraftError | OSError) -> None:
    if isinstance(error, OSError):
        named = f": {error.filename}" if error.filename else ""
        show_line("error", f"{error.strerror or error}{named}")
        return
    show_line("error", str(error))
    if error.hint:
        show_line("hint", error.hint)
