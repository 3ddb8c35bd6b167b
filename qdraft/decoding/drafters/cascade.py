"""Repetitions in the text, looked over by the draft model before the target sees them."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.policy.schedule import Gate
from qdraft.decoding.records import Distribution, Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.verification import draw, point_mass
from qdraft.errors import LogitsError


class CascadeDrafter:
    """Lets the draft model read a repetition in one batch, and offers what it agrees with.

    The draft's rows in a batch cost less than one after the other, and a wrong repetition costs
    no wide batch of the target. Where the model disagrees its own token is offered in place, and
    the draft ends there. A repetition is no draw: leaving it for what the model thinks of it does
    not change the law. The cascade of Staged Speculative Decoding, Spector and Re 2023
    (arXiv:2308.04623), with the n-grams at its end.
    """

    source = "cascade"

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        """Both are begun, and told what was accepted, by whoever holds them."""
        self._ngram = ngram
        self._model = model

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        n = min(gate.many(self.source, self._model.n_behind(context)), self._model.room(context))
        if n < 1 or not self._model.can_read(context):
            return Draft()
        repeated = self._ngram.repetition(context, n)
        if not repeated:
            return Draft()
        n_caught_up = self._model.catch_up(context)
        n_good = self._model.engine.n_past
        rows = self._model.rows_after(context, repeated)
        tokens: list[int] = []
        probs: list[Distribution] = []
        confidence: list[float] = []
        dropped = False
        try:
            for row, token in zip(rows, repeated, strict=True):
                q = None if sampler.greedy else sampler.distribution(row, context, tokens)
                own = sampler.argmax(row, context, tokens)
                top = sampler.confidence(row) if q is None else float(q.probs.max())
                agreed = token == own if q is None else q.prob(token) > 0
                sure = (top if token == own else 0.0) if q is None else q.prob(token)
                repeats = agreed and gate.take(self.source, sure)
                if not repeats:
                    if not gate.take(self.source, top):
                        break
                    sure = top
                tokens.append(token if repeats else own if q is None else draw(q, rng))
                confidence.append(sure)
                if q is not None:
                    probs.append(point_mass(token) if repeats else q)
                if not repeats or self._model.engine.vocab.is_end(token):
                    break
        except LogitsError:
            dropped = True
        # Cells of repetitions that were not offered are of other tokens than the text's.
        n_kept = sum(t == r for t, r in zip(tokens, repeated, strict=False))
        # After bad logits none of this round's cells are trusted.
        self._model.engine.truncate(n_good if dropped else len(context) + n_kept)
        return Draft(
            tuple(tokens),
            None if sampler.greedy else tuple(probs),
            self.source,
            tuple(confidence),
            len(repeated),
            n_caught_up,
            dropped,
        )

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        pass
