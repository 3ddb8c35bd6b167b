"""One answer in the making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qdraft.decoding.records import Chunk, FinishReason
from qdraft.decoding.summary import Summary
from qdraft.session.generation import Generation


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of an answer: ``summary`` of its text, and what it left of the context.

    ``n_context`` tokens of ``n_ctx`` are used after it. Of the prompt, the target had ``n_reused``
    tokens in its cache and read ``n_read``.
    """

    summary: Summary
    reason: FinishReason
    seed: int
    n_context: int
    n_ctx: int
    n_reused: int
    n_read: int


class Answer:
    """An answer: iterate once for its chunks. It becomes a part of the chat when it ends.

    ``stop`` ends it after the round that is under way; so does leaving the loop. What it has
    written by then is kept.
    """

    def __init__(
        self, generation: Generation, n_ctx: int, settle: Callable[[Answer], None]
    ) -> None:
        """``settle`` makes the answer a part of the chat."""
        self.generation = generation
        self._n_ctx = n_ctx
        self._settle = settle
        self._is_stopped = False
        self._has_ended = False

    def __iter__(self) -> Iterator[Chunk]:
        try:
            while not self._is_stopped and (chunks := self.generation.step()):
                yield from chunks
        finally:
            self.end()

    @property
    def has_begun(self) -> bool:
        """Tell whether the model has read the prompt and written a token."""
        return bool(self.generation.rounds)

    def stop(self) -> None:
        """End the answer after the round that is under way."""
        self._is_stopped = True

    def end(self) -> None:
        """End the answer here; harmless when repeated."""
        if not self._has_ended:
            self._has_ended = True
            self.generation.close()
            self._settle(self)

    @property
    def text(self) -> str:
        return self.generation.text

    @property
    def cut(self) -> str:
        """Why the answer is not whole; empty if the model or a stop string ended it."""
        reason = self.generation.finish_reason
        whole = (FinishReason.END_OF_GENERATION, FinishReason.STOP_STRING)
        return "" if reason in whole else reason.value

    @property
    def figures(self) -> Figures:
        """The figures of the answer so far."""
        text = self.generation
        n_prompt, n_reused = len(text.prompt), text.n_reused.target
        return Figures(
            text.summary,
            text.finish_reason,
            text.seed,
            n_context=n_prompt + len(text.tokens),
            n_ctx=self._n_ctx,
            n_reused=n_reused,
            n_read=n_prompt - n_reused if text.rounds else 0,
        )
