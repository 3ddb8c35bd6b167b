"""Gates: how far one round drafts.

The drafter asks its gate before it pays for another draft row, and again before it offers a token
from that row. Both answers may depend on the draft's distributions and on the tokens that are
already offered, never on a token that is then left out. So the law of the text stays the
target's (docs/concepts/exactness.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import MAX_N_DRAFT


class Gate(Protocol):
    """Decides token by token whether a round drafts on."""

    @property
    def weighs_confidence(self) -> bool:
        """False if ``take`` ignores the confidence, which the drafter then need not compute."""
        ...

    def more(self, source: str, n_behind: int = 0) -> bool:
        """True if another row of this source is worth paying for; counts nothing.

        ``n_behind`` is the number of tokens that the drafter has to read first.
        """
        ...

    def take(self, source: str, confidence: float) -> bool:
        """True if the token of a row that is already computed is worth verifying.

        Each True counts that token as offered; the drafter must then offer it.
        """
        ...

    def extend(self, n: int) -> int:
        """How many of ``n`` tokens are worth verifying that cost no row and are certain to stand.

        They count as offered, but not against the longest draft.
        """
        ...


class CountingGate:
    """Admits ``n_max`` tokens, and turns away tokens whose confidence is below ``p_min``."""

    def __init__(self, n_max: int, p_min: float = 0.0) -> None:
        self._left = n_max
        self._drafts = n_max > 0  # the target alone is not measured with a wider batch
        self._p_min = p_min
        self.weighs_confidence = p_min > 0

    def more(self, source: str, n_behind: int = 0) -> bool:
        return self._left > 0

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        self._left -= 1
        return True

    def extend(self, n: int) -> int:
        return n if self._drafts else 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What drafts of one source are expected to bring in this round.

    ``n_most`` is the longest draft whose loss the account covers, ``speed`` the best expected speed
    over the target alone, in target tokens, 1 or more: that of drafting nothing.
    """

    alpha: float
    c: float
    n_most: int
    speed: float


class CostGate:
    """Drafts on as long as further tokens are expected to pay off. This is the draft-on rule.

    k tokens are offered so far and the text reaches place k, the next one, with probability R, the
    product of the acceptance chances of these k tokens. The draft goes on if for some m, with
    k + m at most the longest draft,

        R a (1 + alpha + ... + alpha^(m-1))  >  S (max(0, m - f) c + v(k+1+m) - v(k+1))

    On the left is what m more tokens are expected to bring. On the right is what they cost: time
    in target tokens, at S tokens a target token. All m are tried, because v is jagged. S is the
    best speed that drafts of this source are expected to reach, and at least 1, that of the target
    alone: a token that brings less in the same time lowers the speed. alpha is the acceptance rate
    of the source. If a recurrent state went back, the tokens that are read again widen both batches
    of v.

    ``more`` applies the rule before the drafter pays for a row: a = alpha, f = 0. ``take`` applies
    it once a row is computed and its confidence is known: a is the acceptance rate at that
    confidence, and f = 1 because that row costs nothing more.

    What bounds the rule, for each source by itself:

    1. Hope. For the first row, a is alpha plus ``hope`` standard deviations, in proportion to what
       the account still holds, so that an unlucky start is not the end.
    2. Stake. A draft is so short that losing all of it, ``CostTable.risk``, costs at most the
       stake of the account.
    3. Reading. A drafter more than ``n_read_free`` tokens behind drafts only if it is expected to
       win back the time to read, and what earlier readings still owe, within the tokens that may
       still come (``n_horizon`` at most); or if the stake covers both. There is no hope in this.
       The same holds for the cost of a restart after a pause, which the stake must cover too.
    4. Rent. A draft that takes memory from a target that does not fit is worth it only if the best
       speed with it, times 1 - rent, is above that of the target alone (``CostTable.rents``).
    5. No token below ``p_min`` is offered.

    Tokens that are certain to stand (``extend``) are worth their verification alone: m of them if
    R m > S (v(n+1+m) - v(n+1)), where n counts them among the tokens offered so far.
    """

    weighs_confidence = True

    def __init__(
        self,
        learned: Learned,
        n_max: int,
        *,
        n_to_come: int,
        p_min: float = 0.0,
        n_reread: int = 0,
    ) -> None:
        """``n_to_come`` is the number of tokens that the text may still grow by.

        The decode has ``n_reread`` rows more, which a round without a draft has too.
        """
        self._learned = learned
        self._costs = learned.costs
        self._n_max = n_max
        self._n_horizon = min(n_to_come, learned.constants.n_horizon)
        self._p_min = p_min
        self._n_reread = n_reread
        self._outlooks: dict[str, Outlook] = {}
        self._k = 0  # tokens offered so far, without those that are certain
        self._n_certain = 0
        self._reach = 1.0  # R, the chance that all of them are accepted

    def more(self, source: str, n_behind: int = 0) -> bool:
        outlook = self._outlook(source)
        if self._k:
            return self._pays_off(outlook, self._reach * outlook.alpha, n_paid=0)
        hope = self._learned.constants.hope * self._learned.account.confidence
        chance = self._learned.acceptance.overall(source, hope)
        return (
            self._pays_off(outlook, chance, n_paid=0)
            and self._pays_rent(source, chance, outlook.n_most)
            and self._may_start(source, n_behind)
        )

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        reach = self._reach * self._learned.acceptance.at(source, confidence)
        if not self._pays_off(self._outlook(source), reach, n_paid=1):
            return False
        self._k += 1
        self._reach = reach
        return True

    def extend(self, n: int) -> int:
        v, width, speed = self._costs.v, self._width, max(1.0, self._learned.account.speed)
        for m in range(n, 0, -1):
            if self._reach * m > speed * (v(width + m) - v(width)):
                self._n_certain += m
                return m
        return 0

    @property
    def _width(self) -> int:
        """Rows of a verify batch with the tokens offered so far."""
        return self._n_reread + self._k + self._n_certain + 1

    def _pays_off(self, outlook: Outlook, reach: float, *, n_paid: int) -> bool:
        """True if some m further tokens are expected to bring more than they cost.

        ``reach`` is R a, the chance that the first of them is accepted; ``n_paid`` is f.
        """
        v, alpha, width = self._costs.v, outlook.alpha, self._width
        gain = 0.0
        for m in range(1, outlook.n_most - self._k + 1):
            gain += reach
            reach *= alpha
            price = outlook.speed * (max(0, m - n_paid) * outlook.c + v(width + m) - v(width))
            if gain > price:
                return True
            if gain * (1 - alpha) + reach <= price * (1 - alpha):  # no longer draft gains more
                return False
        return False

    def _outlook(self, source: str) -> Outlook:
        if source not in self._outlooks:
            alpha = self._learned.acceptance.overall(source)
            n_most = self._longest(source)
            speed = self._best_speed(source, alpha, n_most)
            self._outlooks[source] = Outlook(alpha, self._costs.c(source), n_most, speed)
        return self._outlooks[source]

    def _longest(self, source: str) -> int:
        """The longest draft that loses no more than the stake (bound 2)."""
        n, n_max = 0, min(self._n_max, self._costs.longest_draft(source))
        stake = self._learned.account.stake
        while n < n_max and self._costs.risk(source, n + 1, self._n_reread) <= stake:
            n += 1
        return n

    def _best_speed(self, source: str, alpha: float, n_most: int, *, full: bool = False) -> float:
        """The best expected speed of drafts of up to ``n_most`` tokens; 1 if none pays off."""
        c = self._costs.c(source, full=full)
        best, tokens, reach = 1.0, 1.0, 1.0
        for n in range(1, n_most + 1):
            reach *= alpha
            tokens += reach
            time = n * c + self._costs.v(n + 1, full=full)
            best = max(best, tokens / time)
            if tokens * (1 - alpha) + reach * alpha <= best * time * (1 - alpha):
                break  # no longer draft is faster
        return best

    def _pays_rent(self, source: str, alpha: float, n_most: int) -> bool:
        """True if drafts are worth the memory that they take (bound 4)."""
        rent = self._costs.rent(source)
        return not rent or self._best_speed(source, alpha, n_most) * (1 - rent) > 1

    def _may_start(self, source: str, n_behind: int) -> bool:
        """True if what a first row costs beyond itself is worth it (bound 3)."""
        needed = self._costs.restart(source)
        if n_behind > self._learned.constants.n_read_free:
            needed += self._costs.reading(source, n_behind) + self._learned.account.owed
        if needed <= self._learned.account.stake:
            return True
        outlook = self._outlook(source)
        speed = self._best_speed(source, outlook.alpha, outlook.n_most, full=True)
        speed *= 1 - self._costs.rent(source)
        return self._costs.complete and self._n_horizon * (1 - 1 / speed) > needed


def would_draft(learned: Learned, source: str) -> bool:
    """Tell whether a draft of this source would pay off now, in a text that goes on."""
    n_horizon = learned.constants.n_horizon
    return CostGate(learned, MAX_N_DRAFT, n_to_come=n_horizon).more(source)
