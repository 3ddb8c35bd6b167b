"""Drafts that cost nothing: the tokens that a constraint forces.

If a constraint allows one token only, that token has probability 1 under p and q alike. It is
offered as a point mass and verified as any other, without a row of the draft model.
"""

from __future__ import annotations

from collections.abc import Sequence

from qdraft.decoding.constraint import FORCED
from qdraft.decoding.drafters.protocol import Offers, Verified
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler


def offer_forced(
    offers: Offers, context: Sequence[int], gate: Gate, sampler: Sampler
) -> Sequence[int]:
    """Offer the tokens that are certain to follow, as many as ``gate`` admits; return them."""
    if sampler.constraint is None:
        return ()
    forced = sampler.constraint.forced(context, offers.tokens)
    forced = forced[: gate.extend(len(forced))] if forced else ()
    offers.add_forced(forced)
    return forced


class ForcedDrafter:
    """Drafts the tokens that the constraint of the text forces, and nothing else."""

    source = FORCED

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        offers = Offers()
        forced = offer_forced(offers, context, gate, sampler)
        return offers.as_draft(self.source, 0, 0) if forced else Draft()

    def accept(self, verified: Verified) -> None:
        pass
