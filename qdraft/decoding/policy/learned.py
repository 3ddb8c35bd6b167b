"""What the draft policy has learned of a pair: costs, acceptance and the account."""

from __future__ import annotations

from dataclasses import dataclass, field

from qdraft.decoding.policy.acceptance_table import AcceptanceTable
from qdraft.decoding.policy.account import Account
from qdraft.decoding.policy.constants import PolicyConstants
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.records import Round


@dataclass(frozen=True, slots=True)
class Learned:
    """The tables of one pair. They go on from text to text and learn from every round."""

    costs: CostTable = field(default_factory=CostTable)
    acceptance: AcceptanceTable = field(default_factory=AcceptanceTable)
    account: Account = field(default_factory=Account)

    @classmethod
    def with_constants(cls, constants: PolicyConstants, costs: Costs | None = None) -> Learned:
        """Tables that are empty, except for ``costs`` as loading measures them."""
        learned = cls(
            CostTable(constants=constants), AcceptanceTable(constants), Account(constants)
        )
        if costs:
            learned.costs.start(costs)
        return learned

    @property
    def constants(self) -> PolicyConstants:
        """The constants that the tables were made with; a schedule takes the same."""
        return self.costs.constants

    def start_text(self) -> None:
        """Prepare for another text, which may be of another kind."""
        self.acceptance.start_text()

    def add(self, round: Round) -> None:
        """Learn from a round after the prompt's."""
        cost = self.costs.add(round)
        self.acceptance.add(round)
        self.account.add(round, cost)
