"""Repetitions in the text first, the draft model where they do not pay."""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.core.rng import Rng
from qdraft.core.sampling import Sampler
from qdraft.core.schedule import Gate
from qdraft.drafters.base import Drafter
from qdraft.types import Draft


class HybridDrafter:
    """Offers the first drafter's tokens, or the second's when the gate lets none of them by.

    The gate weighs each source by its own record: a first drafter that has not been paying is
    turned away, at no cost, and a round is always of one source.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._drafters = (first, second)

    def begin(self, prompt: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.begin(prompt)

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        first, second = self._drafters
        draft = first.draft(context, gate, sampler, rng)
        return draft if draft.tokens else second.draft(context, gate, sampler, rng)

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        for drafter in self._drafters:
            drafter.accept(n_accepted, context)
