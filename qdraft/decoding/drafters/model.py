"""A draft model, with its own KV cache or with the target's."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.policy.schedule import Gate
from qdraft.decoding.records import Distribution, Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Row, Sampler
from qdraft.decoding.verification import draw
from qdraft.errors import LogitsError

log = logging.getLogger(__name__)


class Courier(Protocol):
    """Brings the target's KV cells into the draft's cache."""

    def copy(self, start: int) -> None:
        """Replace the draft's cells from ``start`` on by the target's, all that it has."""
        ...


class ModelDrafter:
    """Drafts by decoding a second model one token at a time.

    With a courier the draft's cache starts each round as a copy of the target's: it never
    reads the prompt, and sees what the target saw. Without one it keeps its own accepted
    cells, and what is missing (the prompt at first, the last draft token and the bonus token
    after a full acceptance) is read as one batch with the next draft.

    Rows are fitted to ``n_vocab`` tokens, the target's vocabulary.
    """

    source = "model"

    def __init__(self, engine: TokenSequence, n_vocab: int, courier: Courier | None = None) -> None:
        self.engine = engine
        self._n_vocab = n_vocab
        self._n_own_vocab = engine.vocab.n_tokens
        self._courier = courier
        self._n_shared = 0  # cells at the start that are the target's
        self._n_prompt = 0
        self._in_step = False  # has this text had its first copy?
        self._told_full = False

    def begin(self, prompt: Sequence[int]) -> None:
        self._n_shared = min(self._n_shared, self.engine.keep(prompt[:-1]))
        self._n_prompt = len(prompt)
        self._in_step = False
        self._told_full = False

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        if not gate.more(self.source, self.n_behind(context)):
            return Draft()
        room = self.room(context)
        if room < 1 or not self.can_read(context):
            return Draft()
        n_caught_up = self.catch_up(context)
        n_good = self.engine.n_past
        feed = context[n_good:]
        tokens: list[int] = []
        probs: list[Distribution] = []
        confidence: list[float] = []
        n_rows = 0
        dropped = False
        try:
            while len(tokens) < room and (n_rows == 0 or gate.more(self.source)):
                row = self._fit(self.engine.eval(feed, 1)[0])
                n_rows += 1
                if sampler.greedy:
                    sure = sampler.confidence(row) if gate.weighs_confidence else 1.0
                else:
                    q = sampler.distribution(row, context, tokens)
                    sure = float(q.probs.max())
                if not gate.take(self.source, sure):
                    break
                if sampler.greedy:
                    token = sampler.argmax(row, context, tokens)
                else:
                    probs.append(q)
                    token = draw(q, rng)
                tokens.append(token)
                confidence.append(sure)
                if self.engine.vocab.is_end(token):
                    break
                feed = [token]
        except LogitsError:
            # What is drawn stays: dropping it for what came of it would change its law. But
            # whatever made the row bad may sit in the cells of this round: those go.
            self.engine.truncate(n_good)
            dropped = True
        return Draft(
            tuple(tokens),
            None if sampler.greedy else tuple(probs),
            self.source,
            tuple(confidence),
            n_rows,
            n_caught_up,
            dropped,
        )

    def n_behind(self, context: Sequence[int]) -> int:
        """Tokens of ``context`` that have to be read before drafting after it."""
        return 0 if self._courier else len(context) - 1 - self.engine.n_past

    def can_read(self, context: Sequence[int]) -> bool:
        """False for a text with tokens that only the target's vocabulary has."""
        return self._n_own_vocab >= self._n_vocab or max(context) < self._n_own_vocab

    def rows_after(self, context: Sequence[int], tokens: Sequence[int]) -> Row:
        """Rows for each of ``tokens`` after ``context``, in one batch, shape [n, n_vocab].

        Row i is of the distribution of token i.
        """
        feed = [*context[self.engine.n_past :], *tokens[:-1]]
        rows = self.engine.eval(feed, len(tokens))
        return np.stack([self._fit(row) for row in rows])

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        # All but the last token of the new context is known to be cached correctly, as far
        # as it is cached: a rejected draft token sits at that last place or after it.
        self.engine.truncate(min(self.engine.n_past, len(context) - 1))

    def _fit(self, row: Row) -> Row:
        """A row over the target's vocabulary: cut, or padded with what is never drawn."""
        if len(row) >= self._n_vocab:
            return row[: self._n_vocab]
        return np.pad(row, (0, self._n_vocab - len(row)), constant_values=-np.inf)

    def room(self, context: Sequence[int]) -> int:
        """How many tokens this cache has room to draft; warns once when it is full."""
        room = self.engine.n_ctx - len(context) + 1  # the last draft token is never decoded here
        if room < 1 and not self._told_full:
            self._told_full = True
            log.warning(
                "the draft's context of %d tokens is full: the target goes on alone",
                self.engine.n_ctx,
            )
        return room

    def catch_up(self, context: Sequence[int]) -> int:
        """Bring the cache up to the text but its last token, or close to it.

        Returns the number of tokens that are read, or copied as a whole prompt, for that.
        """
        if self._courier:
            n_before, in_step = self._n_shared, self._in_step
            self._courier.copy(n_before)
            self._n_shared, self._in_step = self.engine.n_past, True
            return 0 if in_step else self._n_shared - n_before
        n_past, n_all = self.engine.n_past, len(context) - 1
        n_prompt = min(self._n_prompt, n_all)
        if n_past < n_prompt:
            # The prompt in a batch of its own, as the target read it: other batch shapes give
            # other roundings, which stay in the cells and cost acceptance.
            self.engine.eval(context[n_past:n_prompt], 0)
        return n_all - n_past
