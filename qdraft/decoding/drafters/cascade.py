"""Repetitions in the text, which the draft model reviews before the target sees them."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Offers, Verified
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler, point_mass
from qdraft.errors import LogitsError


class CascadeDrafter:
    """Lets the draft model read a repetition in one batch, and offers what the model agrees with.

    The draft's rows in a batch cost less than one after the other, and a wrong repetition costs
    no wide batch of the target. At the first token that the model does not agree with, its own
    token is offered instead, and the draft ends. A repetition is not a draw, so leaving it
    because of what the model thinks of it does not change the law. The cascade of Staged
    Speculative Decoding, Spector and Re 2023 (arXiv:2308.04623), with the n-grams at its end.
    """

    source = "cascade"

    def __init__(self, ngram: NgramDrafter, model: ModelDrafter) -> None:
        """The caller begins both drafters, and tells both what was accepted."""
        self._ngram = ngram
        self._model = model

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        repeated = self._repetition(context, gate)
        if not repeated:
            return Draft()
        n_caught_up = self._model.catch_up(context)
        n_good = self._model.sequence.n_past
        rows = self._model.rows_after(context, repeated)
        is_end = self._model.sequence.vocab.is_end
        offers = Offers()
        dropped = False
        try:
            for row, token in zip(rows, repeated, strict=True):
                proposal = sampler.propose(row, context, offers.tokens)
                confidence = proposal.confidence_in(token)
                if confidence > 0 and gate.take(self.source, confidence):
                    offers.add(token, None if sampler.greedy else point_mass(token), confidence)
                    if is_end(token):
                        break
                    continue
                confidence = proposal.confidence
                if gate.take(self.source, confidence):
                    offers.add(proposal.token(rng), proposal.probs, confidence)
                break
        except LogitsError:
            dropped = True
        # Cells of repetitions that were not offered are of other tokens than the text's.
        n_kept = sum(t == r for t, r in zip(offers.tokens, repeated, strict=False))
        # After bad logits none of this round's cells are trusted.
        self._model.sequence.truncate(n_good if dropped else len(context) + n_kept)
        return offers.as_draft(self.source, len(repeated), n_caught_up, dropped=dropped)

    def _repetition(self, context: Sequence[int], gate: Gate) -> list[int]:
        """The repeated tokens that the model should review; none if that does not pay."""
        n = min(gate.many(self.source, self._model.n_behind(context)), self._model.room(context))
        if n < 1 or not self._model.can_read(context):
            return []
        return self._ngram.repetition(context, n)

    def accept(self, verified: Verified) -> None:
        pass
