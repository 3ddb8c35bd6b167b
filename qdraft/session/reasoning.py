"""Reasoning: what a model writes between the marks of its chat template, before its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qdraft.errors import UsageError
from qdraft.llama.chat_template import TemplateOptions
from qdraft.session.text import TextVocab, control_names, n_overlap


@dataclass(frozen=True, slots=True)
class Marks:
    """What begins and ends the reasoning, and what begins an answer without any."""

    start: str
    end: str
    answer: str = ""


# As the templates of models have them. The first whose start or end a template names counts.
_MARKS = (
    Marks("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Nemotron, MiniMax-M2, ...
    Marks("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Marks("<seed:think>", "</seed:think>"),
    Marks("<mm:think>", "</mm:think>"),  # MiniMax-M3
    Marks("<|channel>thought", "<channel|>"),  # Gemma 4
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Marks(  # gpt-oss
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
)
# Variables that switch reasoning on and off in templates.
_SWITCHES = ("enable_thinking", "thinking")
_PROBE: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of text, as what is of the answer and what is of the reasoning."""

    content: str = ""
    reasoning: str = ""


def find_marks(vocab: TextVocab) -> Marks | None:
    """Return the marks of reasoning that the chat template names; None if it names none."""
    text = vocab.chat_template
    return next((each for each in _MARKS if each.start in text or each.end in text), None)


def mark_tokens(vocab: TextVocab, marks: Marks) -> frozenset[int]:
    """Return the control tokens that the marks are made of."""
    return frozenset(control_names(vocab, marks.start + marks.end).values())


def is_open(vocab: TextVocab, marks: Marks, prompt: Sequence[int]) -> bool:
    """Tell whether a prompt ends inside the reasoning, which its template has then begun.

    What comes before the last control token that is not a mark belongs to other turns.
    """
    own = mark_tokens(vocab, marks)
    start = len(prompt)
    while start and (prompt[start - 1] in own or not vocab.is_control(prompt[start - 1])):
        start -= 1
    pieces = (vocab.piece(token, special=True) for token in prompt[start:])
    text = b"".join(pieces).decode("utf-8", "replace")
    return text.rfind(marks.start) > text.rfind(marks.end)


class EndOfReasoning:
    """Finds the end of a reasoning that the prompt has begun, for what holds for the answer only.

    Called with the tokens after the prompt, it returns how many of them there are up to the token
    that completes the end mark; None before that.
    """

    def __init__(self, vocab: TextVocab, marks: Marks) -> None:
        self._vocab = vocab
        self._end = marks.end.encode()
        self._clear: list[int] = []  # tokens that are known to hold no whole mark
        self._text = b""  # theirs, as far as it may begin a mark

    def __call__(self, tokens: Sequence[int]) -> int | None:
        n = len(self._clear)
        if list(tokens[:n]) != self._clear:
            self._clear, self._text, n = [], b"", 0
        text = self._text
        for place in range(n, len(tokens)):
            text += self._vocab.piece(tokens[place], special=True)
            if self._end in text:
                return place + 1
            text = text[-len(self._end) :]
            self._clear.append(tokens[place])
            self._text = text
        return None


def switch_reasoning(vocab: TextVocab, *, on: bool) -> dict[str, bool]:
    """Return the variables of the chat template that switch reasoning on or off.

    They are those that change the prompt. Raises UsageError if the template has no such variable,
    unless the model reasons anyway, or never does.
    """
    names = [name for name in _SWITCHES if name in vocab.chat_template]
    switches = [
        name
        for name in names
        if len({vocab.render_chat(_PROBE, TemplateOptions({name: x})) for x in (True, False)}) > 1
    ]
    if not switches and (find_marks(vocab) is None) == on:
        raise UsageError(
            f"this model's chat template cannot switch reasoning {'on' if on else 'off'}"
        )
    return dict.fromkeys(switches, on)


class ReasoningSplitter:
    """Splits an answer into reasoning and content while it streams.

    The reasoning begins at the start mark, which only white space may precede, or is open from the
    beginning. It ends at the first end mark. Marks and the white space around them are no part of
    either; all other text is released, and a text without marks is content as it is. Text that may
    be the beginning of a mark is held back until that is certain.
    """

    def __init__(self, marks: Marks, *, opened: bool = False) -> None:
        self._marks = marks
        self._held = ""
        self._take: Callable[[str], Split] = self._reason if opened else self._begin
        self._is_first = True  # nothing of the reasoning is out yet
        self.is_reasoning = opened

    def push(self, text: str) -> Split:
        """Return what this text releases."""
        text, self._held = self._held + text, ""
        return self._take(text) if text else Split()

    def flush(self) -> Split:
        """Return what was held back at the end."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self.is_reasoning else Split(held)

    def _begin(self, text: str) -> Split:
        """Take the text before the start mark."""
        body, marks = text.lstrip(), self._marks
        if body.startswith(marks.start):
            self.is_reasoning, self._take = True, self._reason
            return self._take(body[len(marks.start) :])
        if marks.answer and body.startswith(marks.answer):
            self._take = self._wait
            return self._take(body[len(marks.answer) :])
        if any(mark.startswith(body) for mark in (marks.start, marks.answer)):
            self._held = text
            return Split()
        self._take = Split  # all that follows is content
        return Split(text)

    def _reason(self, text: str) -> Split:
        """Take the text of the reasoning."""
        if self._is_first:
            text = text.lstrip()
        place = text.find(self._marks.end)
        if place >= 0:
            self.is_reasoning, self._take = False, self._wait
            after = self._take(text[place + len(self._marks.end) :])
            return Split(after.content, text[:place].rstrip())
        body = text[: len(text) - n_overlap(text, self._marks.end)].rstrip()
        self._held = text[len(body) :]
        self._is_first = self._is_first and not body
        return Split(reasoning=body)

    def _wait(self, text: str) -> Split:
        """Take the white space after the end mark."""
        text = text.lstrip()
        if text:
            self._take = Split  # all that follows is content
        return Split(text)
