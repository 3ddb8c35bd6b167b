"""What drafting may lose, and the speed of the last rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.policy.cost_table import RoundCost, RoundKind
from qdraft.decoding.records import Round


class LossBudget:
    """Bounds what drafting may cost, in target tokens. Above the limit qdraft drafts nothing.

    The bound. Let D be ``debt``, L the limit, m = ``max_loss`` and N = ``n_window``. A drafted
    round that took ``spent`` target tokens for its n tokens adds spent - n to D. A plain round of
    n tokens takes n target tokens and lowers D by m n, but not below 0. L starts at
    ``first_limit`` and grows by m a token to N m. Over any N tokens the target alone takes N, and

        time beyond N = sum of (spent - n) over the drafted rounds
                      = D(end) - D(start) + what plain rounds paid back + what was forgiven.

    If drafting never gains, D(start) is 0 or more. Plain rounds pay back at most N m. A round
    drafts only while D < L <= N m, so D(end) <= N m if the last drafted round stays within L.
    Then N tokens take at most 2 m longer than the target alone: 1.6 %.

    The exceptions to that bound:

    - A round may end beyond L. ``CostGate`` drafts only if D + half of what a fully rejected draft
      costs is below L. D counts at most ``most_over`` beyond L (0.5 % of N). More than that is
      forgiven, because one long rejected draft would otherwise stop drafting for good.
    - Gains make D negative, down to -``most_saved``, and may be lost again (2.5 % of N). Without
      them two unlucky rounds would stop a draft that pays off.
    - D starts once the time of one target token is known. It leaves out the time in which a drafter
      first reads the text, and the first decode of each width over a link (``CostTable.add``).
    """

    def __init__(self, constants: PolicyConstants = CONSTANTS) -> None:
        self._constants = constants
        self._limit = constants.first_limit
        # Tokens and time of the last rounds.
        self._recent: deque[tuple[int, float]] = deque(maxlen=constants.n_speed_rounds)
        self.debt = 0.0

    def add(self, round: Round, cost: RoundCost) -> None:
        """Take in a round, with its cost from ``CostTable.add``."""
        if cost.kind in (RoundKind.SETUP, RoundKind.UNPRICED):
            return
        rules, n = self._constants, round.n_emitted
        self._limit = min(self._limit + rules.max_loss * n, rules.max_loss * rules.n_window)
        self._recent.append((n, cost.spent))
        if cost.kind is RoundKind.PLAIN:
            self.debt = max(min(0.0, self.debt), self.debt - rules.max_loss * n)
            return
        debt = self.debt + cost.spent - n
        self.debt = min(max(-rules.most_saved, debt), self._limit + rules.most_over)

    @property
    def exhausted(self) -> bool:
        """True if nothing more may be lost."""
        return self.debt >= self._limit

    @property
    def speed(self) -> float:
        """Tokens per target-token time over the last rounds; 1 before there are any."""
        return _speed(self._recent) if self._recent else 1.0

    @property
    def leeway(self) -> float:
        """Share of the limit that is left, 0 to 1: what may be risked to find out more."""
        return min(1.0, max(0.0, 1 - self.debt / self._limit))

    def affords(self, loss: float) -> bool:
        """True if losing this many target tokens stays within the limit."""
        return self.debt + loss < self._limit


def _speed(rounds: Collection[tuple[int, float]]) -> float:
    return sum(n for n, _ in rounds) / sum(time for _, time in rounds)
