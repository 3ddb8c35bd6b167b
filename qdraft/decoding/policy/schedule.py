"""Schedules: which gate each round gets."""

from __future__ import annotations

from typing import Protocol

from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.policy.gate import CostGate, CountingGate, Gate
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import DecodeParams, Round


class Schedule(Protocol):
    """Chooses, round by round, how many tokens are drafted."""

    def gate(self, n_max: int, n_reread: int = 0) -> Gate:
        """The gate of the next round, which must not admit more than ``n_max`` tokens.

        The target's decode has ``n_reread`` rows beside that of the last token and the draft's.
        """
        ...

    def observe(self, round: Round) -> None:
        """Take in the round that the last gate was for."""
        ...


class FixedSchedule:
    """Always ``n_draft`` tokens (fewer below ``p_min``), except in rare plain rounds.

    A plain round is an ordinary decode of the target: it costs no token and measures the target
    alone. Rounds 1 and 2 after the prompt are plain, then one in ``plain_every`` (0: none at all).
    """

    def __init__(
        self, n_draft: int, p_min: float = 0.0, plain_every: int = CONSTANTS.plain_every
    ) -> None:
        self._n_draft = n_draft
        self._p_min = p_min
        self._plain_every = plain_every
        self._n_rounds = 0

    def gate(self, n_max: int, n_reread: int = 0) -> Gate:
        every, n = self._plain_every, self._n_rounds
        plain = every and (n in (1, 2) or n % every == every - 1)
        return CountingGate(0 if plain else min(self._n_draft, n_max), self._p_min)

    def observe(self, round: Round) -> None:
        self._n_rounds += 1


class CostAwareSchedule:
    """Drafts as far as drafting pays off by what was learned (the rule is in ``CostGate``).

    A round that drafts nothing measures the target alone. While every round drafts, a plain round
    costs what a draft would have gained, S - 1 tokens at speed S. So one is due as soon as that is
    ``measuring_share`` of the tokens since the last one.
    """

    def __init__(self, n_draft: int, learned: Learned | None = None, *, p_min: float = 0.0) -> None:
        """``learned`` goes on from text to text."""
        self.learned = learned or Learned()
        self._constants = self.learned.constants
        self._n_draft = n_draft
        self._p_min = p_min

    def gate(self, n_max: int, n_reread: int = 0) -> Gate:
        n_to_come = n_max + 1  # a round emits a token after its draft
        n_max = min(n_max, self._n_draft)
        if n_max < 1 or self._must_measure():
            return CountingGate(0)
        return CostGate(
            self.learned, n_max, n_to_come=n_to_come, p_min=self._p_min, n_reread=n_reread
        )

    def observe(self, round: Round) -> None:
        if round.n_prompt:
            self.learned.costs.add_prompt(round)
        else:
            self.learned.add(round)

    def _must_measure(self) -> bool:
        if self.learned.costs.target_s is None:
            return True
        rules = self._constants
        price = max(rules.least_price, self.learned.account.speed - 1)
        return self.learned.costs.n_since_alone * rules.measuring_share >= price


def schedule_for(params: DecodeParams, n_draft: int, learned: Learned) -> Schedule:
    """The draft policy of ``params``, with drafts of at most ``n_draft`` tokens."""
    if params.draft_policy == "auto":
        return CostAwareSchedule(n_draft, learned, p_min=params.p_min or 0.0)
    p_min = params.p_min
    if p_min is None:
        p_min = learned.constants.p_min if params.draft_policy == "confidence" else 0.0
    return FixedSchedule(n_draft, p_min, learned.constants.plain_every)
