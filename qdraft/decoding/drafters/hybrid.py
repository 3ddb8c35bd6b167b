"""Repetitions in the text first, the draft model otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.drafters.protocol import Drafter, Verified
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler


class HybridDrafter:
    """Takes the draft of the first of several drafters that offers one.

    The gate weighs each source by its own record and turns away, at no cost, a drafter that has
    not paid off lately. All tokens of a round come from one drafter.
    """

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def begin(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(prompt)

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        draft = Draft()
        for drafter in self._drafters:
            draft = drafter.draft(context, gate, sampler, rng)
            if draft.tokens or draft.n_rows:
                break
        return draft

    def accept(self, verified: Verified) -> None:
        for drafter in self._drafters:
            drafter.accept(verified)
