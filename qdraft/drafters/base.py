"""The Drafter protocol, and the drafter that never drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from qdraft.core.rng import Rng
from qdraft.core.sampling import Sampler
from qdraft.types import Draft


class Drafter(Protocol):
    """Proposes tokens; told after each round how many of them stand."""

    def begin(self, prompt: Sequence[int]) -> None:
        """A new text starts; nothing of an earlier one may be reused."""
        ...

    def draft(
        self, context: Sequence[int], n_draft: int, sampler: Sampler, rng: Rng, *, p_min: float = 0
    ) -> Draft:
        """At most ``n_draft`` tokens to follow ``context``; fewer, or none, is allowed.

        Stopping early may depend on the draft's distributions but never on a token
        drawn from them: dropping an unlikely draw would change its law.
        """
        ...

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        """``n_accepted`` draft tokens stand; ``context`` now ends with the round's last token."""
        ...

    def close(self) -> None: ...


class NoDrafter:
    """The target alone."""

    def begin(self, prompt: Sequence[int]) -> None:
        pass

    def draft(
        self, context: Sequence[int], n_draft: int, sampler: Sampler, rng: Rng, *, p_min: float = 0
    ) -> Draft:
        return Draft()

    def accept(self, n_accepted: int, context: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass
