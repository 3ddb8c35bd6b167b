"""Schedules: which gate each round gets."""

from __future__ import annotations

from typing import Protocol

from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.policy.gate import CostGate, CountingGate, Gate
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import DecodeParams, Round


class Schedule(Protocol):
    """Chooses, round by round, how many tokens are drafted."""

    def gate(self, n_max: int) -> Gate:
        """The gate of the next round, which must not admit more than ``n_max`` tokens."""
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

    def gate(self, n_max: int) -> Gate:
        every, n = self._plain_every, self._n_rounds
        plain = every and (n in (1, 2) or n % every == every - 1)
        return CountingGate(0 if plain else min(self._n_draft, n_max), self._p_min)

    def observe(self, round: Round) -> None:
        self._n_rounds += 1


class CostAwareSchedule:
    """Drafts as far as drafting pays off by what was learned (the rule is in ``CostGate``).

    Rounds of four kinds, in this order of precedence:

    - Plain, to measure the target alone: until one target token is timed, in round 1 after the
      prompt, then once in ``plain_every`` rounds.
    - One token, until the costs are complete: it shows what a draft row and a second row cost.
      The budget must not be exhausted.
    - A probe, after ``first_wait`` tokens without a draft. If it does not pay off, the next wait
      is twice as long, up to ``longest_wait``.
    - As far as ``CostGate`` admits.
    """

    def __init__(self, n_draft: int, learned: Learned | None = None, *, p_min: float = 0.0) -> None:
        """``learned`` goes on from text to text."""
        self.learned = learned or Learned()
        self._constants = self.learned.constants
        self._n_draft = n_draft
        self._p_min = p_min
        self._read_s = 0.0  # time in which the target reads a token of the prompt
        self._n_rounds = 0
        self._n_since_draft = 0  # tokens
        self._wait = self._constants.first_wait

    def gate(self, n_max: int) -> Gate:
        n_max = min(n_max, self._n_draft)
        learned = self.learned
        if self._must_measure() or n_max < 1:
            return CountingGate(0)
        if not learned.costs.complete:
            return CountingGate(0 if learned.loss.exhausted else 1, self._p_min)
        return CostGate(
            learned, n_max, p_min=self._p_min, read_s=self._read_s, probe=self._is_probe
        )

    def observe(self, round: Round) -> None:
        self._n_rounds += 1
        if round.n_prompt:
            self._read_s = round.times.verify_s / round.n_prompt
            return
        self.learned.add(round)
        if not round.draft.n_rows:
            self._n_since_draft += round.n_emitted
            return
        if self._is_probe:
            paid_off = round.n_emitted > 1 and self.learned.loss.debt <= 0
            longer = min(self._constants.longest_wait, 2 * self._wait)
            self._wait = self._constants.first_wait if paid_off else longer
        self._n_since_draft = 0

    def _must_measure(self) -> bool:
        n, every = self._n_rounds, self._constants.plain_every
        return self.learned.costs.target_s is None or n == 1 or n % every == every - 1

    @property
    def _is_probe(self) -> bool:
        return self._n_since_draft >= self._wait


def schedule_for(params: DecodeParams, n_draft: int, learned: Learned) -> Schedule:
    """The draft policy of ``params``, with drafts of at most ``n_draft`` tokens."""
    if params.draft_policy == "auto":
        return CostAwareSchedule(n_draft, learned, p_min=params.p_min or 0.0)
    p_min = params.p_min
    if p_min is None:
        p_min = learned.constants.p_min if params.draft_policy == "confidence" else 0.0
    return FixedSchedule(n_draft, p_min, learned.constants.plain_every)
