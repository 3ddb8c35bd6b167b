"""Gates: how far one round drafts.

The drafter asks its gate before it pays for another draft row, and again before it offers a token
from that row. Both answers may depend on the draft's distributions and on the tokens that are
already offered, never on a token that is then left out. So the law of the text stays the
target's (docs/concepts/exactness.md).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from qdraft.decoding.policy.learned import Learned


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


class CountingGate:
    """Admits ``n_max`` tokens, and turns away tokens whose confidence is below ``p_min``."""

    def __init__(self, n_max: int, p_min: float = 0.0) -> None:
        self._left = n_max
        self._p_min = p_min
        self.weighs_confidence = p_min > 0

    def more(self, source: str, n_behind: int = 0) -> bool:
        return self._left > 0

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        self._left -= 1
        return True


class Extension(NamedTuple):
    """m further draft tokens: expected tokens gained, and their price in tokens."""

    gain: float
    price: float
    m: int

    @property
    def pays_off(self) -> bool:
        return self.gain > self.price


class CostGate:
    """Drafts on as long as further tokens are expected to pay off. This is the draft-on rule.

    k tokens are offered so far and the text reaches place k, the next one, with probability R, the
    product of the acceptance chances of these k tokens. The draft goes on if for some m, with
    k + m at most ``n_max``,

        R a (1 + alpha + ... + alpha^(m-1))  >  S (max(0, m - f) c + v(k+1+m) - v(k+1))

    On the left is what m more tokens are expected to bring. On the right is what they cost: time
    in target tokens, at S tokens a target token. All m are tried, because v is jagged. S is the
    speed of the last rounds (``LossBudget.speed``): a token that brings less than the average
    round does in the same time lowers the speed. alpha is the acceptance rate of the source.

    ``more`` applies the rule before the drafter pays for a row: a = alpha, f = 0. ``take`` applies
    it once a row is computed and its confidence is known: a is the acceptance rate at that
    confidence, and f = 1 because that row costs nothing more.

    The exceptions:

    1. Hope. For the first token (k = 0), ``more`` takes a = alpha plus ``hope`` standard
       deviations times the leeway of the budget, so that an unlucky start is not the end.
    2. S is at least 1: while drafting loses, its tokens are not cheaper than the target's.
    3. Budget. ``n_max`` is at most the longest draft of which ``worst_case_share`` of the cost of
       full rejection, n c + v(n+1) - 1, is affordable. There is no such bound while drafting has
       gained more than it lost (debt below 0).
    4. Probe. The first token of a probe is drafted although it is expected to lose. The bound of
       exception 3 is then one token, whatever the table says about its cost, unless the budget is
       exhausted.
    5. Reading. A drafter more than ``n_read_free`` tokens behind drafts only if ``n_horizon``
       tokens, at (gain - price) / (1 + price) each, gain more than the time to read, min(1, c)
       times the target's, or if the budget affords that time. The first rounds, of one token
       until the costs are complete, read whatever it costs.
    6. No token below ``p_min`` is offered.
    """

    weighs_confidence = True

    def __init__(
        self,
        learned: Learned,
        n_max: int,
        *,
        p_min: float = 0.0,
        read_s: float = 0.0,
        probe: bool = False,
    ) -> None:
        """``read_s`` is the time in which the target reads a token of the prompt."""
        self._costs = learned.costs
        self._acceptance = learned.acceptance
        self._loss = learned.loss
        self._constants = learned.constants
        self._n_max = n_max
        self._p_min = p_min
        self._read_s = read_s
        self._probe = probe
        self._longest: dict[str, int] = {}  # the longest draft that the budget affords, by source
        self._k = 0  # tokens offered so far
        self._reach = 1.0  # R, the chance that all of them are accepted

    def more(self, source: str, n_behind: int = 0) -> bool:
        first = self._k == 0
        if self._k >= self._bound(source):
            return False
        hope = self._constants.hope * self._loss.leeway if first else 0.0
        chance = self._acceptance.overall(source, hope)
        best = self._best_extension(source, self._reach * chance, n_paid=0)
        if not self._worth_reading(source, n_behind, best):
            return False
        return best.pays_off or (self._probe and first)

    def take(self, source: str, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        reach = self._reach * self._acceptance.at(source, confidence)
        best = self._best_extension(source, reach, n_paid=1)
        if not (best.pays_off or (self._probe and self._k == 0)):
            return False
        self._k += 1
        self._reach = reach
        return True

    def _best_extension(self, source: str, reach: float, *, n_paid: int) -> Extension:
        """The m further tokens whose gain exceeds their price by most.

        ``reach`` is R a, the chance that the first of them is accepted; ``n_paid`` is f.
        """
        alpha, c, v = self._acceptance.overall(source), self._costs.c(source), self._costs.v
        speed = max(1.0, self._loss.speed)
        width = self._k + 1
        best = Extension(0.0, 0.0, 0)
        gain = 0.0
        for m in range(1, self._bound(source) - self._k + 1):
            gain += reach
            reach *= alpha
            price = speed * (max(0, m - n_paid) * c + v(width + m) - v(width))
            if m == 1 or gain - price > best.gain - best.price:
                best = Extension(gain, price, m)
        return best

    def _bound(self, source: str) -> int:
        """The longest draft of this source in this round. A dear source must not limit others."""
        if source not in self._longest:
            self._longest[source] = self._affordable(source)
        return self._longest[source]

    def _affordable(self, source: str) -> int:
        """The longest draft that the budget allows (exceptions 3 and 4)."""
        if self._loss.debt < 0:
            return self._n_max
        if self._probe and not self._loss.exhausted:
            return 1
        n, share = 0, self._constants.worst_case_share
        while n < self._n_max and self._loss.affords(
            share * ((n + 1) * self._costs.c(source) + self._costs.v(n + 2) - 1)
        ):
            n += 1
        return n

    def _worth_reading(self, source: str, n_behind: int, best: Extension) -> bool:
        """True if drafting should win back the time to read ``n_behind`` tokens (exception 5)."""
        if n_behind <= self._constants.n_read_free:
            return True
        target_s = self._costs.target_s or 1.0
        reading = n_behind * self._read_s * min(1.0, self._costs.c(source)) / target_s
        won = self._constants.n_horizon * (best.gain - best.price) / (1 + best.price)
        return won > reading or self._loss.affords(reading)
