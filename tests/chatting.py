"""A pair for chats without a model: what it answers is written down beforehand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from qdraft.chat.chat import Chat
from qdraft.chat.settings import Settings
from qdraft.chat.transcript import Transcript, new_path
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.llama.chat_template import NO_OPTIONS, TemplateOptions
from qdraft.session.pair import Sequences
from qdraft.session.session import Session
from qdraft.session.threads import Threads
from qdraft.testing import FakeKvCopy, FakeSequence, FakeVocab

# Every byte, words that the tokenizer takes whole, and the marks of a chat.
WORDS = [b"the", b" the", b"an", b"end"]
MARKS = [b"<system>", b"<user>", b"<assistant>", b"<end>"]
PIECES = [*(bytes([i]) for i in range(256)), *WORDS, *MARKS]
ASSISTANT, END = len(PIECES) - 2, len(PIECES) - 1
GREEDY = SamplingParams(temperature=0)


class ChatVocab(FakeVocab):
    """A vocabulary whose template is ``<role>content<end>`` for each message.

    If it ``can_think``, an answer begins with ``(no)`` where thinking is off. The template leaves
    the reasoning of earlier answers out.
    """

    can_think = False

    @property
    def chat_template(self) -> str:
        return "enable_thinking <think> </think>" if self.can_think else ""

    def __init__(self) -> None:
        marks = range(256 + len(WORDS), len(PIECES))
        super().__init__(PIECES, end=[END], control=list(marks), chat="")

    def render_chat(
        self, messages: Sequence[dict[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        turns = (f"<{message['role']}>{message['content']}<end>" for message in messages)
        off = options.kwargs.get("enable_thinking") is False
        return "".join(turns) + "<assistant>" + ("(no)" if off and self.can_think else "")


class WholeSequence(FakeSequence):
    """A sequence whose cells an interrupt leaves as they should be."""

    is_whole = True


class ChatPair:
    """What a chat asks of a pair. The model answers with ``answers``, one byte a token.

    The n-th answer of a text is the n-th of them, and the last one from then on.
    """

    def __init__(self, *answers: str, n_ctx: int = 4096) -> None:
        self.answers = answers or ("the end",)
        self.lock = threading.RLock()
        self.vocab = ChatVocab()
        self.target = SimpleNamespace(path=Path("target.gguf"), file_type="F16", n_bytes=2_000_000)
        self.draft: Any = SimpleNamespace(
            path=Path("draft.gguf"), file_type="Q2_K", n_bytes=1_000_000
        )
        self.contexts = SimpleNamespace(target=SimpleNamespace(n_ctx=n_ctx))
        self.kv = SimpleNamespace(shared=True, reason="")
        self.placed = [SimpleNamespace(n_offloaded=0)] * 2
        self.recommended = SimpleNamespace(
            params=lambda: GREEDY, values={}, used_in=lambda sampling: {}
        )
        self.learned = Learned()
        self.threads = Threads([])
        self.sequences: list[FakeSequence] = []

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        places = [i for i, token in enumerate(tokens) if token == ASSISTANT]
        n_said = len(tokens) - places[-1] - 1
        answer = [*self.answers[min(len(places), len(self.answers)) - 1].encode(), END]
        row = np.zeros(len(PIECES))
        row[answer[min(n_said, len(answer) - 1)]] = 50.0
        return row

    def session(self) -> Session:
        return Session(self)  # type: ignore[arg-type]

    def open_sequences(self) -> Sequences:
        n_ctx = self.contexts.target.n_ctx
        target, draft = (WholeSequence(self.logits, self.vocab, n_ctx=n_ctx) for _ in range(2))
        self.sequences.append(target)
        return Sequences(target, draft, FakeKvCopy(target, draft))  # type: ignore[arg-type]

    def register(self, session: Session) -> None: ...

    def forget(self, session: Session) -> None: ...

    def require_rollback(self) -> None: ...

    def observe(self, round: Round) -> None: ...

    def save_costs(self) -> None: ...

    def show_progress(self, progress: object) -> None: ...


def make_chat(*answers: str, n_ctx: int = 4096, save: bool = True, **decode: Any) -> Chat:
    """A chat with a pair that gives these answers, greedy and with drafts of four tokens."""
    params = DecodeParams(draft_policy="fixed", n_draft=4, **decode)
    transcript = Transcript(new_path(), {"target": "target.gguf"}) if save else None
    pair: Any = ChatPair(*answers, n_ctx=n_ctx)
    return Chat(pair, Settings(GREEDY, params), transcript)


def say(chat: Chat, text: str) -> str:
    """Ask, and return the whole answer."""
    answer = chat.ask(text)
    for _ in answer:
        pass
    return answer.text
