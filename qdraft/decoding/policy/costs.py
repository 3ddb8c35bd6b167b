"""What the schedules know: measured times, acceptance by confidence, and what was lost lately."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from statistics import median

from qdraft.decoding.records import Round

_N_TIMES = 21  # the last ratios of a kind; their median is what counts
ENOUGH = 3  # times measured, for a ratio to be kept
_N_ALONE = 7  # the last times of the target alone
_REACH = 3  # rows beyond the widest measured batch that may be tried next
_HOPE = 0.25  # share of the last slope that is expected there: v is steepest at its first step
_CARRIED = 0.3  # weight of an earlier text's tests in the next one
_FRESH = 192  # rounds after which a width that was not measured is tried as a new one
_KEPT_FOR = 48  # the same for what an earlier run kept
N_READ_FREE = 3  # tokens that a draft may read first and its time still be that of its rows


class CostTable:
    """Times of a draft row (by source) and of a target decode (by number of rows).

    Each is measured against the target tokens decoded alone at about the same time, because
    what else a machine does changes all of them together.

    A draft after a round without one costs more than the same draft among others (cells to copy,
    graphs to build): its times count only where others are not known, or are old. v of a width
    that was not measured for ``_FRESH`` rounds is not known any more.
    """

    def __init__(
        self,
        target_s: float | None = None,
        c: Mapping[str, float] | None = None,
        v: Mapping[int, float] | None = None,
        *,
        over_a_link: bool = False,
    ) -> None:
        """Start from the medians of earlier runs, as ``medians`` gives them.

        ``over_a_link``: a part of the target is on another machine.
        """
        self.over_a_link = over_a_link
        self.setup = False  # was the last round the first of its width over a link?
        self._target: deque[float] = deque([target_s] if target_s else [], maxlen=_N_ALONE)
        self._c: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIMES))
        self._v: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIMES))
        self._kept_c, self._kept_v = dict(c or {}), dict(v or {})
        for source, ratio in self._kept_c.items():
            self._c[source].append(ratio)
        for width, ratio in self._kept_v.items():
            self._v[width].append(ratio)
        # The medians, looked up many times a round.
        self._target_s = target_s or None
        self._c_mid = dict(self._kept_c)
        self._v_mid = dict(self._kept_v)
        self._v_of: dict[int, float] = {}
        self._n_rounds = 0
        self._drafted_last = False
        self._measured_at = dict.fromkeys(self._kept_v, _KEPT_FOR - _FRESH)
        self._seen: set[int] = set()  # widths that were decoded since the model was loaded
        self._settled_at: dict[int | str, int] = {}  # by width and source: among other drafts

    def add(self, round: Round) -> None:
        """Take in the times of a round (not the prompt's); verifying is a part of the decode."""
        verify_s = round.times.verify_s + round.times.other_s
        among_others, self._drafted_last = self._drafted_last, bool(round.n_draft)
        self._n_rounds += 1
        self._v_of.clear()
        self.setup = self._is_setup(round.n_draft + 1)
        if self.setup:
            return
        if not round.n_draft:
            self._target.append(verify_s)
            self._target_s = median(self._target)
        if self._target_s is None:
            return
        if round.n_draft:
            width, ratio = round.n_draft + 1, verify_s / self._target_s
            self._measured_at[width] = self._n_rounds
            if self._counts(width, among_others):
                self._v[width].append(ratio)
                self._v_mid[width] = median(self._v[width])
        if round.draft.n_rows and round.draft.n_caught_up <= N_READ_FREE:
            source, ratio = round.source, round.times.draft_s / round.draft.n_rows / self._target_s
            if self._counts(source, among_others):
                self._c[source].append(ratio)
                self._c_mid[source] = median(self._c[source])

    def _is_setup(self, width: int) -> bool:
        """Is this the first decode of its width, over a link?

        It lays out what the later ones reuse, in messages and answers of its own.
        """
        first = width not in self._seen
        self._seen.add(width)
        return first and self.over_a_link

    def _counts(self, what: int | str, among_others: bool) -> bool:
        """Is a time of this width or source to be taken in?"""
        if among_others:
            self._settled_at[what] = self._n_rounds
        settled = self._settled_at.get(what)
        return among_others or settled is None or self._n_rounds - settled > _FRESH

    @property
    def target_s(self) -> float | None:
        """Seconds of one target token alone, lately."""
        return self._target_s

    @property
    def complete(self) -> bool:
        """True once drafting can be judged: one row, some wider decode, one draft."""
        return self.target_s is not None and bool(self._v) and bool(self._c)

    def c(self, source: str) -> float:
        """Time of a draft row of this source over that of one target token; 0 if unknown."""
        return self._c_mid.get(source, 0.0)

    def v(self, n: int) -> float:
        """Time of a target decode of ``n`` rows over that of one.

        Measured where it was, else on the line between the measured neighbours. Up to
        ``_REACH`` rows beyond the widest measured one it is guessed low, so that wider batches
        get tried; after that it is infinite, so that they are tried step by step.
        """
        if n not in self._v_of:
            self._v_of[n] = self._estimate(n)
        return self._v_of[n]

    def _estimate(self, n: int) -> float:
        # One by one, n rows cost n: whatever was measured beyond that was a disturbance.
        # Two rows are measured at every probe; what is known of more of them grows old.
        fresh = {
            width: x
            for width, x in self._v_mid.items()
            if width == 2 or self._n_rounds - self._measured_at.get(width, 0) < _FRESH
        }
        known = {1: 1.0, **{width: min(width, x) for width, x in fresh.items()}}
        if n in known:
            return known[n]
        below = sorted(width for width in known if width < n)
        above = sorted(width for width in known if width > n)
        if not above and n > below[-1] + _REACH:
            return math.inf
        low, high = (below[-1], above[0]) if above else (below[-2] if below[1:] else 1, below[-1])
        slope = max(0.0, (known[high] - known[low]) / max(1, high - low))
        return known[low] + (n - low) * slope if above else known[high] + (n - high) * slope * _HOPE

    def medians(self, n_least: int = 1) -> tuple[float | None, dict[str, float], dict[int, float]]:
        """Seconds of a target token, c by source, and v by number of rows.

        What was measured less than ``n_least`` times is given as it was kept before, if it was.
        """
        c = {source: median(x) for source, x in self._c.items() if len(x) >= n_least}
        v = {width: median(x) for width, x in self._v.items() if len(x) >= n_least}
        return self.target_s, {**self._kept_c, **c}, dict(sorted({**self._kept_v, **v}.items()))


class AcceptanceTable:
    """Share of tested draft tokens that were accepted, by source and by the draft's confidence.

    A bin starts from the share over all of them, which a few tests of its own outweigh; old
    tests fade, so that a text may change its kind.
    """

    _EDGES = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)
    _BELIEF = 3.0  # tests that the starting belief counts as
    _MEMORY = 60.0  # tests that a bin remembers

    def __init__(self) -> None:
        self._bins: dict[tuple[str, int], tuple[float, float]] = {}
        self._all: dict[str, tuple[float, float]] = {}

    def add(self, round: Round) -> None:
        """Take in the tested tokens of a round."""
        for i, confidence in enumerate(round.draft.confidence[: round.n_tested]):
            accepted = float(i < round.n_accepted)
            key = (round.source, self._bin(confidence))
            self._bins[key] = self._count(self._bins.get(key, (0.0, 0.0)), accepted)
            self._all[round.source] = self._count(self._all.get(round.source, (0.0, 0.0)), accepted)

    def start_text(self) -> None:
        """Another text begins: what was learned of the last one counts less."""
        self._bins = {key: _carry(counts) for key, counts in self._bins.items()}
        self._all = {key: _carry(counts) for key, counts in self._all.items()}

    def at(self, source: str, confidence: float) -> float:
        """Chance that a token of this confidence is accepted."""
        counts = self._bins.get((source, self._bin(confidence)), (0.0, 0.0))
        return self._chance(counts, self.overall(source))

    def overall(self, source: str, hope: float = 0.0) -> float:
        """Chance that a token of unknown confidence is accepted.

        ``hope`` adds that many standard deviations of what is not known yet.
        """
        return self._chance(self._all.get(source, (0.0, 0.0)), 0.7, hope)

    def _chance(self, counts: tuple[float, float], belief: float, hope: float = 0.0) -> float:
        n = counts[1] + self._BELIEF
        mean = (counts[0] + self._BELIEF * belief) / n
        return min(1.0, mean + hope * math.sqrt(mean * (1 - mean) / (n + 1)))

    def _bin(self, confidence: float) -> int:
        return sum(confidence >= edge for edge in self._EDGES)

    def _count(self, counts: tuple[float, float], accepted: float) -> tuple[float, float]:
        fade = min(1.0, self._MEMORY / (counts[1] + 1))
        return (fade * (counts[0] + accepted), fade * (counts[1] + 1))


def _carry(counts: tuple[float, float]) -> tuple[float, float]:
    return (_CARRIED * counts[0], _CARRIED * counts[1])


class RecentLoss:
    """Bounds what drafting may cost, in target-token times.

    ``debt`` grows with every drafted round that took longer than its tokens would have taken
    alone and shrinks with every one that gained. Rounds without a draft pay it back at
    ``max_loss`` a token. The limit starts at ``_START`` and grows by ``max_loss`` a token to
    200 times that. Kept below it, where drafting never gains any 200 tokens take at most
    2 ``max_loss`` longer than the target alone. What was gained before may be lost again,
    up to ``_SAVED``: else two unlucky rounds would end a draft that pays. What goes more than
    ``_OVER`` beyond the limit is forgiven, so that one long rejected draft does not end it either.
    """

    _START = 1.0
    _SAVED = 5.0
    _OVER = 1.0

    _N_TOKENS = 200
    _N_ROUNDS = 24  # rounds that the current speed is taken from
    _N_TRIED = 4  # rounds of a source before its own speed is believed
    _STALE = 96  # rounds without a source after which it is tried again

    def __init__(self, max_loss: float = 0.008) -> None:
        self._max_loss = max_loss
        self._limit = self._START
        self._recent: deque[tuple[int, float]] = deque(maxlen=self._N_ROUNDS)
        self._of_source: dict[str, deque[tuple[int, float]]] = {}
        self._last_round: dict[str, int] = {}
        self._n_rounds = 0
        self.debt = 0.0

    def add(self, round: Round, costs: CostTable) -> None:
        """Take in a round. Reading the prompt is no loss of the draft that first needed it, nor is
        what the first decode of a width sets up over a link."""
        target_s = costs.target_s
        if target_s is None or costs.setup:
            return
        grown = self._limit + self._max_loss * round.n_emitted
        self._limit = min(grown, self._max_loss * self._N_TOKENS)
        if round.draft.n_rows:
            spent = round.times.total_s / target_s
            if round.draft.n_caught_up > N_READ_FREE:
                spent += round.draft.n_rows * costs.c(round.source) - round.times.draft_s / target_s
            debt = self.debt + spent - round.n_emitted
            self.debt = min(max(-self._SAVED, debt), self._limit + self._OVER)
        else:
            spent = float(round.n_emitted)
            self.debt = max(min(0.0, self.debt), self.debt - self._max_loss * round.n_emitted)
        self._recent.append((round.n_emitted, spent))
        self._n_rounds += 1
        if round.draft.n_rows:
            of_source = self._of_source.setdefault(round.source, deque(maxlen=self._N_ROUNDS))
            of_source.append((round.n_emitted, spent))
            self._last_round[round.source] = self._n_rounds

    @property
    def exhausted(self) -> bool:
        return self.debt >= self._limit

    @property
    def speed(self) -> float:
        """Tokens per target-token time over the last rounds; 1 before there are any."""
        return _speed(self._recent) if self._recent else 1.0

    def speed_of(self, source: str) -> float:
        """The same over the last rounds of one source; infinite where little is known of it."""
        known = self._of_source.get(source, ())
        stale = self._n_rounds - self._last_round.get(source, 0) > self._STALE
        return math.inf if stale or len(known) < self._N_TRIED else _speed(known)

    @property
    def leeway(self) -> float:
        """How much of the limit is left, 0 to 1: what may be risked to find out more."""
        return min(1.0, max(0.0, 1 - self.debt / self._limit))

    def affords(self, loss: float) -> bool:
        """True if a round that is expected to lose this much stays within the limit."""
        return self.debt + loss < self._limit


def _speed(rounds: Collection[tuple[int, float]]) -> float:
    return sum(n for n, _ in rounds) / sum(time for _, time in rounds)
