"""The views of a chat: the line after each answer, and what the commands show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from qdraft.chat.answer import Answer, Figures
from qdraft.chat.chat import Chat
from qdraft.chat.commands import Command
from qdraft.chat.settings import Settings
from qdraft.chat.transcript import Saved
from qdraft.decoding.records import FinishReason
from qdraft.decoding.summary import Summary
from qdraft.render.foreign import one_line
from qdraft.render.layout import PlainTable, line, wrapped
from qdraft.render.placed import placed_view
from qdraft.render.run import summary_view
from qdraft.session.pair import ModelInfo, Pair

_LONGEST = 34  # columns of the first question in a list of chats
_CUT = {
    FinishReason.INTERRUPTED: "stopped",
    FinishReason.LENGTH: "cut by n_predict",
    FinishReason.CONTEXT_FULL: "cut, the context is full",
    FinishReason.ERROR: "cut by an error",
}
_KEYS = {
    "Enter": "sends the message",
    "Alt-Enter": "begins a new line",
    '"""': "begins and ends a message of several lines",
    "Ctrl-C": "stops an answer, which stays in the chat; clears the line",
    "Ctrl-D": "leaves",
}


def answer_line(figures: Figures) -> Text:
    """One line about an answer: its speed, its drafts, and the context."""
    summary = figures.summary
    parts = [_CUT.get(figures.reason, ""), _count(summary.n_tokens, "token"), *_speeds(summary)]
    parts += [f"context {figures.n_context}/{figures.n_ctx}", f"{figures.n_reused} reused"]
    return Text(", ".join(filter(None, parts)), style="label")


def _speeds(summary: Summary) -> list[str]:
    """Tokens per second, times the target alone, and the share of accepted drafts, if measured."""
    figures = (
        (summary.tokens_per_second, "{:.1f} t/s"),
        (summary.speedup if summary.is_comparable else None, "{:.2f}x alone"),
        (None if summary.alpha is None else 100 * summary.alpha, "{:.0f} % accepted"),
    )
    return [form.format(value) for value, form in figures if value is not None]


def greeting_view(pair: Pair, n_ctx: int) -> RenderableType:
    """What a chat starts with: the models, the context, and where to find help."""
    draft = f"draft {pair.draft.file_type}" if pair.draft else "no draft"
    name = one_line(pair.target.path.name)
    return Text(f"{name}, {draft}, context {n_ctx}; /help lists the commands", style="label")


def help_view(commands: Iterable[Command]) -> RenderableType:
    """The commands and the keys."""
    table = PlainTable()
    table.show_header = False
    table.add_column()
    table.add_column()
    for command in commands:
        table.add_row(f"/{command.name} {command.argument}".rstrip(), command.help)
    for key, meaning in _KEYS.items():
        table.add_row(key, meaning)
    return table


def settings_view(settings: Settings) -> RenderableType:
    """Each setting and its value, as many on a line as 80 columns take."""
    values = (f"{name} {_shown(value)}" for name, value in settings.values().items())
    return Group(*wrapped("set", ", ".join(values)), Text(""))


def _shown(value: object) -> str:
    return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def stats_view(answer: Answer | None, chat: Chat) -> RenderableType:
    """The figures of the last answer, as of a run, and those of all answers together."""
    if answer is None or not answer.has_begun:
        return Text("there is no answer yet", style="label")
    figures, text = answer.figures, answer.generation
    seed = None if text.sampling.temperature == 0 else figures.seed
    recommended = chat.pair.recommended.used_in(text.sampling)
    last = summary_view(figures.summary, figures.reason, seed, text.bit_identity, recommended)
    whole = chat.summary
    return Group(
        last,
        line(
            "context",
            f"{figures.n_context} of {figures.n_ctx} tokens",
            f"{figures.n_reused} reused, {figures.n_read} read",
        ),
        line(
            "chat",
            _count(len(chat.conversation.turns), "turn"),
            _count(whole.n_tokens, "token"),
            *_speeds(whole),
        ),
    )


def pair_view(pair: Pair, n_ctx: int) -> RenderableType:
    """The loaded files, what they share, and where they are."""
    lines: list[RenderableType] = [line("target", *_facts(pair.target))]
    if pair.draft:
        lines.append(line("draft", *_facts(pair.draft)))
        lines += wrapped("kv", "shared" if pair.kv.shared else f"not shared: {pair.kv.reason}")
    else:
        lines.append(line("draft", "none"))
    lines.append(line("context", f"{n_ctx} tokens"))
    if placed := placed_view(pair):
        lines.append(placed)
    return Group(*lines)


def _facts(model: ModelInfo) -> tuple[str, str, str]:
    return model.path.name, model.file_type, f"{model.n_bytes / 1e6:.0f} MB"


def chats_view(chats: Sequence[Saved]) -> RenderableType:
    """The saved chats, the last one first."""
    if not chats:
        return Text("no chat is saved yet", style="label")
    table = PlainTable()
    for name in ("chat", "changed", "turns", "first message"):
        table.add_column(name)
    for chat in chats:
        first = " ".join(chat.first.split())
        shown = first if len(first) <= _LONGEST else first[: _LONGEST - 3] + "..."
        table.add_row(chat.name, chat.changed.strftime("%Y-%m-%d %H:%M"), chat.n_turns, shown)
    return table


def turn_view(question: str, answer: str) -> RenderableType:
    """The last turn of a chat that is resumed."""
    return Group(Text(f"> {question}", style="label"), Text(answer))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
