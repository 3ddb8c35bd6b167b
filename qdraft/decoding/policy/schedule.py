"""How many tokens to draft: fixed, by the draft's confidence, or by measured cost.

A schedule is asked before each round for a Gate, and the drafter asks the gate before it pays
for another draft row and before it offers a token from that row. Both answers may depend on
the draft's distributions and on the tokens that are already offered, never on a token that is
then dropped: so the law of the text stays the target's (see docs/concepts/exactness.md).
"""

from __future__ import annotations

from typing import Protocol

from qdraft.decoding.policy.costs import N_READ_FREE, AcceptanceTable, CostTable, RecentLoss
from qdraft.decoding.records import DecodeParams, Round

_HORIZON = 256  # tokens within which reading the text with a draft must pay
PLAIN_EVERY = 24  # rounds between two that measure the target alone


class Gate(Protocol):
    """Decides token by token whether a round drafts on."""

    @property
    def weighs_confidence(self) -> bool:
        """False if ``take`` does not look at the confidence, which then is not computed."""
        ...

    def more(self, source: str, n_behind: int = 0) -> bool:
        """Is it worth paying for another row of this source?

        ``n_behind`` counts the tokens that the drafter has to read for it first.
        """
        ...

    def many(self, source: str, n_behind: int = 0) -> int:
        """How many rows of this source are worth paying for at once; 0 for none."""
        ...

    def take(self, source: str, confidence: float) -> bool:
        """Is a token from the row just paid worth verifying? Counts it if so."""
        ...

    def speed(self, source: str) -> float:
        """Speed of this source's last rounds over the target alone, to choose by.

        Infinite where it should be tried, again or for the first time.
        """
        ...


class Schedule(Protocol):
    """Chooses, round by round, how many tokens are drafted."""

    def plan(self, n_max: int) -> Gate:
        """The gate of the next round, which must not admit more than ``n_max`` tokens."""
        ...

    def observe(self, round: Round) -> None:
        """A round was finished."""
        ...


class CountingGate:
    """Admits ``n_max`` tokens, or fewer where the confidence falls below ``p_min``."""

    def __init__(self, n_max: int, p_min: float = 0.0) -> None:
        self._left = n_max
        self._p_min = p_min
        self.weighs_confidence = p_min > 0

    def more(self, source: str, n_behind: int = 0) -> bool:
        return self._left > 0

    def many(self, source: str, n_behind: int = 0) -> int:
        return self._left

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        self._left -= 1
        return True

    def speed(self, source: str) -> float:
        return 1.0


class FixedSchedule:
    """Always ``n_draft`` tokens (fewer below ``p_min``), but for rare rounds without a draft.

    Those rounds are ordinary target decodes, so they cost no token, and they measure the target
    alone: rounds 1 and 2 after the prompt, then one in ``plain_every`` (0: none at all).
    """

    def __init__(self, n_draft: int, p_min: float = 0.0, plain_every: int = PLAIN_EVERY) -> None:
        self._n_draft = n_draft
        self._p_min = p_min
        self._plain_every = plain_every
        self._n_rounds = 0

    def plan(self, n_max: int) -> Gate:
        every, n = self._plain_every, self._n_rounds
        plain = every and (n in (1, 2) or n % every == every - 1)
        return CountingGate(0 if plain else min(self._n_draft, n_max), self._p_min)

    def observe(self, round: Round) -> None:
        self._n_rounds += 1


class CostAwareSchedule:
    """Drafts on as long as a further token is expected to pay, from measured costs.

    With S the current speed over the target alone, and reach the chance that the text gets to
    the next draft token, m more tokens pay iff

        sum of reach * alpha^j over j = 1..m  >  S (m c + v(k + 1 + m) - v(k + 1))

    for some m; looking at all m matters because v is jagged. alpha is the acceptance seen so
    far at the confidence of the draft row, or over all of them where there is no row yet.

    Never slower: what drafted rounds lose against the target alone is bounded by ``loss``. When
    drafting does not pay it is tried again rarely, at intervals that double. A drafter that has
    to read a part of the text first is let to if drafting is expected to win that back within
    ``_HORIZON`` tokens; the very first time, when nothing is known, it always is.
    """

    def __init__(
        self,
        n_draft: int,
        costs: CostTable,
        acceptance: AcceptanceTable | None = None,
        loss: RecentLoss | None = None,
        *,
        p_min: float = 0.0,
    ) -> None:
        """``costs``, ``acceptance`` and ``loss`` go on from text to text."""
        self.costs = costs
        self.acceptance = acceptance or AcceptanceTable()
        self.loss = loss or RecentLoss()
        self.read_s = 0.0  # seconds in which the target reads a token of the prompt
        self._n_draft = n_draft
        self._p_min = p_min
        self._n_rounds = 0
        self._since_draft = 0
        self._patience = 32

    def plan(self, n_max: int) -> Gate:
        n_max = min(n_max, self._n_draft)
        if self._must_measure() or n_max < 1:
            return CountingGate(0)
        if not self.costs.complete:
            # Nothing known of drafting yet: one token tells what a draft row and the step from
            # one row to two cost.
            return CountingGate(0 if self.loss.exhausted else 1, self._p_min)
        probe = self._since_draft >= self._patience
        return CostGate(self, n_max, self._p_min, probe=probe)

    def _must_measure(self) -> bool:
        """Rounds without a draft measure the target alone: at first, then now and then."""
        n = self._n_rounds
        return self.costs.target_s is None or n == 1 or n % PLAIN_EVERY == PLAIN_EVERY - 1

    def observe(self, round: Round) -> None:
        self._n_rounds += 1
        if round.n_prompt:
            self.read_s = round.times.verify_s / round.n_prompt
            return
        self.costs.add(round)
        self.acceptance.add(round)
        self.loss.add(round, self.costs)
        if round.draft.n_rows:
            if self._since_draft >= self._patience:  # it was a probe
                paid = round.n_emitted > 1 and self.loss.debt <= 0
                self._patience = 32 if paid else min(512, 2 * self._patience)
            self._since_draft = 0
        else:
            self._since_draft += round.n_emitted


def schedule_for(
    params: DecodeParams,
    n_draft: int,
    costs: CostTable,
    acceptance: AcceptanceTable,
    loss: RecentLoss,
) -> Schedule:
    """The draft policy of ``params``, with drafts of at most ``n_draft`` tokens."""
    if params.draft_policy == "auto":
        return CostAwareSchedule(n_draft, costs, acceptance, loss, p_min=params.p_min or 0.0)
    p_min = params.p_min
    if p_min is None:
        p_min = 0.5 if params.draft_policy == "confidence" else 0.0
    return FixedSchedule(n_draft, p_min)


class CostGate:
    """The gate of one round of a CostAwareSchedule."""

    weighs_confidence = True

    def __init__(
        self, schedule: CostAwareSchedule, n_max: int, p_min: float, *, probe: bool
    ) -> None:
        self._costs = schedule.costs
        self._read_s = schedule.read_s
        self._acceptance = schedule.acceptance
        self._loss = schedule.loss
        self._n_max = n_max
        self._p_min = p_min
        self._probe = probe
        self._k = 0  # tokens offered so far
        self._reach = 1.0  # chance that all of them are accepted

    def more(self, source: str, n_behind: int = 0) -> bool:
        return self.many(source, n_behind) > 0

    def many(self, source: str, n_behind: int = 0) -> int:
        if self._k == 0:
            self._n_max = min(self._n_max, self._affordable(source))
        if self._k >= self._n_max:
            return 0
        # Whether to draft at all is decided with hope, as far as there is leeway: an unlucky
        # start should not be the end of it. How far to draft is decided without.
        hope = self._loss.leeway if self._k == 0 else 0.0
        alpha = self._acceptance.overall(source)
        first = self._acceptance.overall(source, hope)
        gain, cost, n = self._best(source, self._reach * first, alpha, n_free=0)
        if n_behind > N_READ_FREE and not self._worth_reading(source, n_behind, gain, cost):
            return 0
        # A probe is one token that is expected to lose.
        return n if gain > cost else int(self._probe and self._k == 0)

    def speed(self, source: str) -> float:
        return self._loss.speed_of(source)

    def _worth_reading(self, source: str, n_behind: int, gain: float, cost: float) -> bool:
        """Will drafting win back the time to read ``n_behind`` tokens?"""
        alone = self._costs.target_s or 1.0
        reading = n_behind * self._read_s * min(1.0, self._costs.c(source)) / alone
        won = _HORIZON * (gain - cost) / (1 + cost)
        return won > reading or self._loss.affords(reading)

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        reach = self._reach * self._acceptance.at(source, confidence)
        gain, cost, _ = self._best(source, reach, self._acceptance.overall(source), n_free=1)
        if gain <= cost and not (self._probe and self._k == 0):
            return False
        self._k += 1
        self._reach = reach
        return True

    def _affordable(self, source: str) -> int:
        """The longest draft that may be tried: any, once drafting has proven itself.

        Before that, half of what a round costs that is rejected whole must be affordable.
        """
        if self._loss.debt < 0:
            return self._n_max
        if self._probe and not self._loss.exhausted:
            return 1  # whatever it costs by the table, which a probe is there to correct
        n = 0
        while n < self._n_max and self._loss.affords(
            0.5 * ((n + 1) * self._costs.c(source) + self._costs.v(n + 2) - 1)
        ):
            n += 1
        return n

    def _best(
        self, source: str, reach: float, alpha: float, *, n_free: int
    ) -> tuple[float, float, int]:
        """Tokens gained, target-token times paid, and the best number of further tokens.

        ``n_free`` rows are paid already. The cost counts at the current speed-up: time spent
        on a token that brings less than the average round brings is lost.
        """
        speed = max(1.0, self._loss.speed)
        width = self._k + 1
        best = (0.0, 0.0, 0)
        gain = 0.0
        for m in range(1, self._n_max - self._k + 1):
            gain += reach
            reach *= alpha
            cost = max(0, m - n_free) * self._costs.c(source)
            cost = speed * (cost + self._costs.v(width + m) - self._costs.v(width))
            if m == 1 or gain - cost > best[0] - best[1]:
                best = (gain, cost, m)
        return best
