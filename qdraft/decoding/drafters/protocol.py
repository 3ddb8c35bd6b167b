"""The Drafter protocol, what its implementations share, and the drafter that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.constraint import FORCED
from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import Distribution, Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler, point_mass


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a drafter learns after a round.

    ``tokens`` is the text up to the round's last token, of which the last ``n_accepted`` before
    that one were drafted. ``features`` are the target's hidden states of the tokens that it read
    in the round, as far as they are in the text, shape [n, n_embd]: those of the prompt at first.
    They are borrowed until the next eval, and None for a drafter that does not need them.
    """

    tokens: Sequence[int]
    n_accepted: int
    features: NDArray[np.float32] | None = None


class Drafter(Protocol):
    """Proposes tokens, and learns after each round how many of them stand.

    One whose attribute ``needs_features`` is true gets ``Verified.features``.
    """

    def begin(self, prompt: Sequence[int]) -> None:
        """A text starts with ``prompt``; keep what an earlier text has in common with it."""
        ...

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        """Tokens to follow ``context``, as many as ``gate`` admits; fewer are allowed.

        Where to stop may depend on the draft's distributions and on tokens that are offered,
        never on a token that is then dropped: that would change its law. The loop raises
        DrafterError for more tokens than ``gate`` took, for a token that the target's vocabulary
        or its q does not have, and for a q that is not a distribution.
        """
        ...

    def accept(self, verified: Verified) -> None:
        """A round has ended; make the drafter's cache agree with the text."""
        ...


class NoDrafter:
    """The target alone."""

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        return Draft()

    def accept(self, verified: Verified) -> None:
        pass


class Offers:
    """The tokens that a drafter has offered in a round, each with its q and its confidence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._forced: list[int] = []
        self._probs: list[Distribution | None] = []
        self._confidence: list[float] = []

    def add(self, token: int, probs: Distribution | None, confidence: float) -> None:
        """Offer ``token``, drawn from ``probs`` (None: not drawn)."""
        self.tokens.append(token)
        self._probs.append(probs)
        self._confidence.append(confidence)

    def add_forced(self, tokens: Sequence[int]) -> None:
        """Offer tokens that the constraint of the text forces."""
        for token in tokens:
            self._forced.append(len(self.tokens))
            self.add(token, None, 1.0)

    def as_draft(
        self, source: str, n_rows: int, n_caught_up: int, *, dropped: bool = False
    ) -> Draft:
        """The draft of these tokens; a draft of forced tokens alone has ``FORCED`` as source."""
        probs = [
            point_mass(token) if q is None else q
            for token, q in zip(self.tokens, self._probs, strict=True)
        ]
        all_forced = self.tokens and len(self._forced) == len(self.tokens) and not n_rows
        return Draft(
            tuple(self.tokens),
            tuple(probs) if any(q is not None for q in self._probs) else None,
            FORCED if all_forced else source,
            tuple(self._confidence),
            n_rows,
            n_caught_up,
            dropped,
            tuple(self._forced),
        )
