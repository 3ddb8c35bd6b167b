"""Repetitions in the text first, reviewed by the model or not; else the draft model."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.drafters.protocol import Drafter, SourceDrafter, Verified
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler


class HybridDrafter:
    """Offers repetitions if they pay, else the tokens of the drafter expected to be fastest.

    The gate weighs each source by its own record and turns a drafter that has not been paying
    away, at no cost. All tokens of a round come from one drafter.
    """

    def __init__(self, first: Drafter, *others: SourceDrafter) -> None:
        self._first, self._others = first, others
        self._drafters: tuple[Drafter, ...] = (first, *others)

    def begin(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(prompt)

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        draft = Draft()
        others = sorted(self._others, key=lambda drafter: -gate.speed(drafter.source))
        for drafter in (self._first, *others):
            draft = drafter.draft(context, gate, sampler, rng)
            if draft.tokens or draft.n_rows:
                break
        return draft

    def accept(self, verified: Verified) -> None:
        for drafter in self._drafters:
            drafter.accept(verified)
