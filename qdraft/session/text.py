"""Between text and tokens: prompts in, incremental UTF-8 and stop strings out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from qdraft.decoding.engine import Vocab
from qdraft.decoding.records import FinishReason
from qdraft.errors import UsageError


class TextVocab(Vocab, Protocol):
    """A vocabulary that also reads text and renders chats."""

    @property
    def bos(self) -> int:
        """The beginning-of-text token, -1 if there is none."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text and its special tokens, with BOS if the model wants it."""
        ...

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the messages in the model's chat template, open for the assistant's turn."""
        ...


def encode_prompt(
    vocab: TextVocab, prompt: str, *, system: str | None = None, raw: bool = False
) -> list[int]:
    """Return the token ids of a prompt, in the chat template unless there is none or ``raw``.

    If the text itself starts with the BOS that the tokenizer adds, only one of the two stays.
    Raises UsageError for an empty prompt, or for a system text without a template.
    """
    chat = vocab.has_chat_template and not raw
    if any("\ud800" <= c <= "\udfff" for c in prompt + (system or "")):
        raise UsageError("the prompt is not valid UTF-8")
    if system is not None and not chat:
        why = "--raw leaves it out" if raw else "this model has none"
        raise UsageError(f"a system text needs a chat template, but {why}")
    if chat:
        messages = [] if system is None else [{"role": "system", "content": system}]
        prompt = vocab.render_chat([*messages, {"role": "user", "content": prompt}])
    tokens = vocab.tokenize(prompt)
    if len(tokens) > 1 and tokens[0] == tokens[1] == vocab.bos:
        del tokens[0]
    if not tokens:
        raise UsageError("the prompt is empty", hint="give a text with -p, with -f or on stdin")
    return tokens


class TextReader:
    """Turns emitted tokens into printable text, one token at a time.

    A character is released with its last byte. Text that may begin a stop string is held back
    until that is certain. All released text together equals the whole text decoded at once, cut
    before the first stop string.
    """

    def __init__(self, vocab: Vocab, stop: Sequence[str] = ()) -> None:
        self._vocab = vocab
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        self.pieces: list[str] = []  # the text that each token of the last round released

    def take(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Read a round's tokens up to the first that ends the text; see ``decoding.loop.Reader``.

        An end-of-generation token ends the text, and so does the token that completes a stop
        string. ``pieces`` then holds the text of each token that was read.
        """
        self.pieces = []
        for i, token in enumerate(tokens):
            self.pieces.append(self.push(token))
            ended = FinishReason.STOP_STRING if self.stopped else None
            if self._vocab.is_end(token):
                ended = FinishReason.END_OF_GENERATION
            if ended:
                return tuple(tokens[: i + 1]), ended
        return tuple(tokens), None

    def push(self, token: int) -> str:
        """Return the text that this token releases; set ``stopped`` if it ends a stop string."""
        return self._release(self._decoder.decode(self._vocab.piece(token)))

    def flush(self) -> str:
        """Return the text that was held back at the end; a cut character becomes one U+FFFD."""
        text = "" if self.stopped else self._release(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        n_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
