"""From tokens to text: incremental UTF-8, control tokens and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from qdraft.decoding.engine import Vocab
from qdraft.decoding.records import FinishReason
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions


class TextVocab(Vocab, Protocol):
    """A vocabulary that also reads text and renders chats."""

    @property
    def bos(self) -> int:
        """The beginning-of-text token, -1 if there is none."""
        ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        ...

    def tokenize(self, text: str, *, parse_special: bool = True, add_bos: bool = True) -> list[int]:
        """Return the token ids of a text, after BOS if the model wants it and ``add_bos``.

        Without ``parse_special`` the names of control tokens in the text are text.
        """
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token adds to the text; of control tokens only if ``special``."""
        ...

    def is_control(self, token: int) -> bool:
        """Tell whether a token is no text by itself, for example the end of a turn."""
        ...

    def render_chat(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """Return the messages in the model's chat template, as ``options`` say."""
        ...


def control_names(vocab: TextVocab, text: str) -> dict[str, int]:
    """Return the names of control tokens that a text holds, longest first, and their ids."""
    tokens = set(vocab.tokenize(text, add_bos=False))
    names = {
        vocab.piece(token, special=True).decode("utf-8", "replace"): token
        for token in tokens
        if vocab.is_control(token)
    }
    held = {name: token for name, token in names.items() if name and name in text}
    return dict(sorted(held.items(), key=lambda item: (-len(item[0]), item[0])))


class TextReader:
    """Turns emitted tokens into printable text, one token at a time.

    A character is released with its last byte. Text that may begin a stop string is held back
    until that is certain. All released text together equals the whole text decoded at once, cut
    before the first stop string. Control tokens are no part of it unless ``special`` or ``shown``,
    but a stop string that names them stops in any case.
    """

    def __init__(
        self,
        vocab: TextVocab,
        stop: Sequence[str] = (),
        *,
        special: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        self._vocab = vocab
        self._special = special
        self._shown = shown
        self._stop = tuple(stop)
        # Control tokens that a stop string names, each as half of a pair, which is in no text.
        self._hidden: dict[int, str] = {}
        if not special:
            self._stop += tuple(filter(None, map(self._hide, stop)))
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
        piece = self._vocab.piece(token, special=self._special or token in self._shown)
        return self._release(self._decoder.decode(piece) + self._hidden.get(token, ""))

    def _hide(self, stop: str) -> str:
        """Return a stop string with control tokens in place of their names; empty without any."""
        hidden = stop
        for name, token in control_names(self._vocab, stop).items():
            mark = self._hidden.setdefault(token, chr(0xD800 + len(self._hidden)))
            hidden = hidden.replace(name, mark)
        return hidden if hidden != stop else ""

    def flush(self) -> str:
        """Return the text that was held back at the end; a cut character becomes one U+FFFD."""
        text = "" if self.stopped else self._release(self._decoder.decode(b"", final=True))
        if not self.stopped:
            text, self._held = text + self._without_hidden(self._held), ""
        return text

    def _release(self, text: str) -> str:
        text = self._held + text
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return self._without_hidden(text[: min(places)])
        n_held = max((n_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - n_held :]
        return self._without_hidden(text[: len(text) - n_held])

    def _without_hidden(self, text: str) -> str:
        for mark in self._hidden.values():
            text = text.replace(mark, "")
        return text


def n_overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
