"""How many tokens to draft in the next round."""

from __future__ import annotations

from typing import Protocol

from qdraft.types import Round


class Schedule(Protocol):
    """Chooses n_draft round by round."""

    def n_draft(self) -> int:
        """The number of tokens to draft now; 0 decodes one target token."""
        ...

    def observe(self, round: Round) -> None:
        """A round was finished."""
        ...


class FixedSchedule:
    """Always ``n_draft``, but for rare rounds without a draft.

    Those rounds are ordinary target decodes, so they cost no token, and they measure
    the target alone: rounds 1 and 2 after the prompt, then one in ``plain_every``
    (0: none at all).
    """

    def __init__(self, n_draft: int, plain_every: int = 32) -> None:
        self._n_draft = n_draft
        self._plain_every = plain_every
        self._n_rounds = 0

    def n_draft(self) -> int:
        every, n = self._plain_every, self._n_rounds
        return 0 if every and (n in (1, 2) or n % every == every - 1) else self._n_draft

    def observe(self, round: Round) -> None:
        self._n_rounds += 1
