"""Repetitions in the text first, looked over by the model or not; the draft model elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.core.rng import Rng
from qdraft.core.sampling import Sampler
from qdraft.core.schedule import Gate
from qdraft.drafters.base import Drafter
from qdraft.types import Draft


class HybridDrafter:
    """Offers the first drafter's tokens, or the next one's when the gate lets none of them by.

    The gate weighs each source by its own record: a drafter that has not been paying is turned
    away, at no cost, and a round is always of one source.
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

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.accept(n_accepted, context)
