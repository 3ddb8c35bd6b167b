"""What drafting may still lose: an account in target tokens, that is in time."""

from __future__ import annotations

from collections import deque

from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.policy.cost_table import RoundCost, RoundKind
from qdraft.decoding.records import Round


class Account:
    """Bounds what drafting costs over the target alone. Time and tokens have one unit here.

    The target alone takes one target token of time for each token. So a drafted round that took
    ``spent`` target tokens for its n tokens changes ``balance`` by n - spent: a gain or a loss. All
    of it counts, however large. Each token of the text also pays ``income`` into the account.

    The bound. ``balance`` starts at F = ``first_balance``. Income raises it to F at most and gains
    to M = ``most_balance`` at most. A round drafts only if losing all of its draft costs at most
    ``stake`` of the balance, so the balance falls below 0 only if a round costs more than was
    known, or by the rent of the last draft. Over any N tokens

        time beyond N = balance(start) - balance(end) + income of these tokens, at most
                      <= M + N income,

    which is M + 1.6 of 200 tokens, and F + 1.6 if drafts never gain.

    Reading the prompt is not a matter of a round: it is an investment that the tokens after it must
    win back. ``owed`` is what earlier readings have not won back yet.
    """

    def __init__(self, constants: PolicyConstants = CONSTANTS) -> None:
        self._constants = constants
        self._recent: deque[tuple[int, float]] = deque(maxlen=constants.n_speed_rounds)
        self.balance = constants.first_balance
        self.owed = 0.0

    def add(self, round: Round, cost: RoundCost) -> None:
        """Take in a round, with its cost from ``CostTable.add``."""
        if cost.kind in (RoundKind.SETUP, RoundKind.UNPRICED):
            return
        rules, n = self._constants, round.n_emitted
        self._recent.append((n, cost.spent))
        income = rules.income * n
        gained = n - cost.spent
        self.balance = max(self.balance, min(self.balance + income, rules.first_balance))
        self.balance = min(self.balance + gained, rules.most_balance)
        if self.owed:
            self.owed = max(0.0, self.owed - gained - income)
        self.owed += cost.reading

    @property
    def stake(self) -> float:
        """The most that one draft may lose, in target tokens."""
        return max(0.0, self._constants.stake * self.balance)

    @property
    def confidence(self) -> float:
        """Share of the first balance that is left, 0 to 1: how much may be hoped for."""
        return min(1.0, max(0.0, self.balance / self._constants.first_balance))

    @property
    def speed(self) -> float:
        """Tokens per target token of time over the last rounds; 1 before there are any."""
        if not self._recent:
            return 1.0
        return sum(n for n, _ in self._recent) / sum(spent for _, spent in self._recent)
