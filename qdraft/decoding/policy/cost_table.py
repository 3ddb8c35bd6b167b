"""What draft rows and target decodes cost, measured in the rounds themselves."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from statistics import median

from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.policy.model import Costs, interpolate_v
from qdraft.decoding.rates import draft_row_seconds
from qdraft.decoding.records import Round


class RoundKind(Enum):
    """How a round counts in the costs and in the budget."""

    SETUP = "setup"  # the first of its width over a link: its times say nothing about later ones
    UNPRICED = "unpriced"  # the time of one target token is not known yet
    PLAIN = "plain"  # without a draft row
    DRAFTED = "drafted"  # with draft rows, even if they offered no token


@dataclass(frozen=True, slots=True)
class RoundCost:
    """How a round counts, and what it cost in target tokens; 0 for SETUP and UNPRICED.

    A PLAIN round costs the tokens that it emitted. The cost of a DRAFTED round leaves out the time
    in which the drafter first read the text, if it was more than a few tokens behind.
    """

    kind: RoundKind
    spent: float = 0.0


class CostTable:
    """Times of a draft row (by source) and of a target decode (by number of rows).

    Each time is divided by that of the target tokens that were decoded alone at about the same
    time, because other programs slow all of them down together.

    The first draft after a plain round costs more than a draft among others (cells to copy,
    graphs to build). Its times count only if no others are known, or if the others are old.
    v of a width that was not measured for ``n_fresh`` rounds is unknown again.
    """

    def __init__(
        self,
        kept: Costs | None = None,
        *,
        over_a_link: bool = False,
        constants: PolicyConstants = CONSTANTS,
    ) -> None:
        """Start from the medians of earlier runs (``medians``), if there are any.

        ``over_a_link`` says that a part of the target is on another machine.
        """
        kept = kept or Costs({}, {})
        self.constants = constants
        self.over_a_link = over_a_link
        self._kept = kept
        self._target: deque[float] = deque(
            [kept.target_s] if kept.target_s else [], maxlen=constants.n_alone
        )
        self._c: dict[str, deque[float]] = defaultdict(self._new_ratios)
        self._v: dict[int, deque[float]] = defaultdict(self._new_ratios)
        for source, ratio in kept.c.items():
            self._c[source].append(ratio)
        for width, ratio in kept.v.items():
            self._v[width].append(ratio)
        # The medians, looked up many times a round.
        self._target_s = kept.target_s or None
        self._c_median = dict(kept.c)
        self._v_median = dict(kept.v)
        self._v_estimated: dict[int, float] = {}
        self._n_rounds = 0
        self._drafted_last = False
        self._measured_at = dict.fromkeys(kept.v, constants.n_fresh_kept - constants.n_fresh)
        self._seen: set[int] = set()  # widths that were decoded since the model was loaded
        self._among_others_at: dict[int | str, int] = {}  # round of the last such draft

    def _new_ratios(self) -> deque[float]:
        return deque(maxlen=self.constants.n_ratios)

    def add(self, round: Round) -> RoundCost:
        """Take in the times of a round after the prompt's, and say what the round cost.

        Verification counts as a part of the target's decode.
        """
        verify_s = round.times.target_s
        among_others, self._drafted_last = self._drafted_last, bool(round.n_draft)
        self._n_rounds += 1
        self._v_estimated.clear()
        if self._is_setup(round.n_draft + 1):
            return RoundCost(RoundKind.SETUP)
        if not round.n_draft:
            self._target.append(verify_s)
            self._target_s = median(self._target)
        if self._target_s is None:
            return RoundCost(RoundKind.UNPRICED)
        if round.n_draft:
            width, ratio = round.n_draft + 1, verify_s / self._target_s
            self._measured_at[width] = self._n_rounds
            if self._counts(width, among_others):
                self._v[width].append(ratio)
                self._v_median[width] = median(self._v[width])
        row_s = draft_row_seconds(round, self.constants.n_read_free)
        if row_s is not None:
            source, ratio = round.source, row_s / self._target_s
            if self._counts(source, among_others):
                self._c[source].append(ratio)
                self._c_median[source] = median(self._c[source])
        return self._price(round, self._target_s)

    def _price(self, round: Round, target_s: float) -> RoundCost:
        if not round.draft.n_rows:
            return RoundCost(RoundKind.PLAIN, float(round.n_emitted))
        spent = round.times.total_s / target_s
        if round.draft.n_caught_up > self.constants.n_read_free:
            # The draft that first needs the text is not charged for reading it: only rows count.
            spent += round.draft.n_rows * self.c(round.source) - round.times.draft_s / target_s
        return RoundCost(RoundKind.DRAFTED, spent)

    def _is_setup(self, width: int) -> bool:
        """True for the first decode of a width over a link.

        It allocates on the other machine what later decodes of that width reuse.
        """
        first = width not in self._seen
        self._seen.add(width)
        return first and self.over_a_link

    def _counts(self, key: int | str, among_others: bool) -> bool:
        """True if a time of this width or source counts."""
        if among_others:
            self._among_others_at[key] = self._n_rounds
        last = self._among_others_at.get(key)
        return among_others or last is None or self._n_rounds - last > self.constants.n_fresh

    @property
    def target_s(self) -> float | None:
        """Seconds of one target token alone: the median of the last ones."""
        return self._target_s

    @property
    def complete(self) -> bool:
        """True once drafting can be judged: one row, some wider decode and one draft are known."""
        return self.target_s is not None and bool(self._v) and bool(self._c)

    def c(self, source: str) -> float:
        """Time of a draft row of this source over that of one target token; 0 if unknown."""
        return self._c_median.get(source, 0.0)

    def v(self, n: int) -> float:
        """Time of a target decode of ``n`` rows over that of one row.

        The measured median, or the line between the measured neighbours. Up to ``n_wider`` rows
        beyond the widest measured width the guess is low, so that wider batches get tried. Beyond
        that it is infinite, so that they are tried step by step.
        """
        if n not in self._v_estimated:
            self._v_estimated[n] = self._estimate(n)
        return self._v_estimated[n]

    def _estimate(self, n: int) -> float:
        # Every probe measures two rows, so v(2) is never unknown again. One by one, n rows cost n:
        # what was measured beyond that was a disturbance.
        oldest = self._n_rounds - self.constants.n_fresh
        fresh = {
            width: min(width, ratio)
            for width, ratio in self._v_median.items()
            if width == 2 or self._measured_at.get(width, 0) > oldest
        }
        widest = max([1, *fresh])
        if n > widest + self.constants.n_wider:
            return math.inf
        # Studies extrapolate to describe a machine, and take the full slope of the last step, or n
        # rows to cost n. Here a round will correct the guess, so the guess is low on purpose.
        if widest == 1:
            return 1.0
        return interpolate_v(fresh, n, slope_beyond=self.constants.slope_beyond)

    def medians(self, n_least: int = 1) -> Costs:
        """What is known: c by source, v by number of rows, and the seconds of a target token.

        A ratio that was measured fewer than ``n_least`` times keeps the value of earlier runs, or
        is left out.
        """
        c = {source: median(x) for source, x in self._c.items() if len(x) >= n_least}
        v = {width: median(x) for width, x in self._v.items() if len(x) >= n_least}
        by_width = {**self._kept.v, **v}
        return Costs({**self._kept.c, **c}, dict(sorted(by_width.items())), self.target_s)
