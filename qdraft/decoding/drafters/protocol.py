"""The Drafter protocol, and the drafter that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qdraft.decoding.policy.schedule import Gate
from qdraft.decoding.records import Draft
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Sampler


class Drafter(Protocol):
    """Proposes tokens; told after each round how many of them stand."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts after ``prompt``; keep what an earlier one has in common with it."""
        ...

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        """Tokens to follow ``context``, as many as ``gate`` admits; fewer is allowed.

        Where to stop may depend on the draft's distributions and on tokens that are
        kept, never on a token that is then dropped: that would change its law.
        """
        ...

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        """``n_accepted`` draft tokens stand; ``context`` now ends with the round's last token."""
        ...


class SourceDrafter(Drafter, Protocol):
    """A drafter whose drafts are all of one source."""

    source: str


class NoDrafter:
    """The target alone."""

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        return Draft()

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        pass
