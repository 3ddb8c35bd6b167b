"""What draft rows and target decodes cost, measured in the rounds themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import TypeVar

from qdraft.decoding.policy.constants import CONSTANTS, PolicyConstants
from qdraft.decoding.policy.model import Costs, interpolate_v
from qdraft.decoding.rates import draft_row_seconds
from qdraft.decoding.records import MAX_N_DRAFT, Round

Key = TypeVar("Key", str, int)


class RoundKind(Enum):
    """How a round counts in the costs and in the account."""

    SETUP = "setup"  # the first of its width over a link: its times say nothing about later ones
    UNPRICED = "unpriced"  # the time of one target token is not known yet
    PLAIN = "plain"  # without a draft row
    DRAFTED = "drafted"  # with draft rows, even if they offered no token


@dataclass(frozen=True, slots=True)
class RoundCost:
    """How a round counts, and what it cost in target tokens; 0 for SETUP and UNPRICED.

    A PLAIN round costs the tokens that it emitted, unless it read tokens again. ``reading`` is the
    time that was expected for the drafter to read the text first, if it was more than a few tokens
    behind; ``spent`` leaves it out, but no more than was expected.
    """

    kind: RoundKind
    spent: float = 0.0
    reading: float = 0.0


class _Figure:
    """One ratio: the median of its last measurements, and the round of the last one."""

    def __init__(self, n_most: int) -> None:
        self._values: deque[float] = deque(maxlen=n_most)
        self.median = 0.0
        self.measured_at = 0
        self.among_others_at: int | None = None  # round of the last draft that followed another

    @property
    def n(self) -> int:
        return len(self._values)

    def add(self, value: float, at: int) -> None:
        self._values.append(value)
        self.median = median(self._values)
        self.measured_at = at


class CostTable:
    """Times of a draft row (by source) and of a target decode (by number of rows).

    Each time is divided by that of the target tokens that were decoded alone at about the same
    time, because other programs slow all of them down together.

    Costs of earlier runs (``kept``) are a belief until this run has measured: c then gives way to
    the measured c, and v keeps its shape but is scaled to go through the widest measured width.

    What was measured long ago is believed to be cheaper than it was: c and v - 1 fade to half
    within ``n_fresh`` rounds without a measurement. So one disturbed time does not end a draft that
    pays off. What a draft may lose (``risk``) is counted at the full price, which hardly fades
    (``n_price_fresh``).

    The first draft after a plain round costs more than a draft among others (cells to copy, graphs
    to build). Its times count only if no others are known, or if the others are old. After a pause
    of more than ``n_pause`` rounds it may cost far more, for example because its weights have left
    memory. What it costs then beyond its rows is the cost of a restart.

    ``rents`` has, by source, the share of a target pass that a draft costs by being in memory: what
    a target that does not fit would save with the same memory. Without the draft a token takes
    1 - rent, so what a round with it spends counts 1 / (1 - rent) times.
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
        self.constants = constants
        self.over_a_link = over_a_link
        self._kept = kept or Costs({}, {})
        self._target: deque[float] = deque(maxlen=constants.n_alone)
        self._target_s: float | None = None
        self._read_s = 0.0  # seconds in which the target reads a token of a prompt
        self._c: dict[str, _Figure] = {}
        self._v: dict[int, _Figure] = {}
        self._restart: dict[str, tuple[float, int]] = {}  # with the round of the measurement
        self._drafted_at: dict[str, int] = {}  # round of the last draft of a source
        self.rents: dict[str, float] = {}
        self._n_rounds = 0
        self.n_since_alone = 0  # tokens since the target was last timed alone
        self._drafted_last = False
        self._seen: set[int] = set()  # widths that were decoded since the model was loaded
        # Looked up many times a round: v by width as believed and at the full price.
        self._curves: dict[bool, Mapping[int, float]] = {}
        self._v_estimated: dict[tuple[int, bool], float] = {}

    def start(self, costs: Costs) -> None:
        """Take in what loading has measured, as the first measurements of this run."""
        if costs.target_s is None:
            return
        self._add_alone(costs.target_s)
        for source, ratio in costs.c.items():
            self._figure(self._c, source).add(ratio, 0)
        for width, ratio in costs.v.items():
            self._figure(self._v, width).add(ratio, 0)
        for source, ratio in costs.restart.items():
            self._restart[source] = (ratio, 0)
        self._forget_estimates()

    def add(self, round: Round) -> RoundCost:
        """Take in the times of a round after the prompt's, and say what the round cost.

        Verification counts as a part of the target's decode.
        """
        verify_s = round.times.target_s
        among_others, self._drafted_last = self._drafted_last, bool(round.n_draft)
        self._n_rounds += 1
        self.n_since_alone = self.n_since_alone + round.n_emitted if round.n_rows > 1 else 0
        self._forget_estimates()
        if self._is_setup(round.n_rows):
            return RoundCost(RoundKind.SETUP)
        if round.n_rows == 1:
            self._add_alone(verify_s)
        if self._target_s is None:
            return RoundCost(RoundKind.UNPRICED)
        if round.n_rows > 1:
            width = self._figure(self._v, round.n_rows)
            self._measure(width, verify_s / self._target_s, among_others=among_others)
        if round.draft.n_rows:
            self._add_rows(round, self._target_s, among_others=among_others)
            self._drafted_at[round.source] = self._n_rounds
        return self._price(round, self._target_s)

    def _add_alone(self, seconds: float) -> None:
        self._target.append(seconds)
        self._target_s = median(self._target)

    def _add_rows(self, round: Round, target_s: float, *, among_others: bool) -> None:
        """Take in the time of the draft rows of a round, if it is the time of rows alone."""
        source = round.source
        beyond = 0.0
        if self.is_restart(source) and source in self._c:
            beyond = round.times.draft_s / target_s - self._reading_of(round, target_s)
            beyond -= round.draft.n_rows * self._c[source].median
            self._restart[source] = (max(0.0, beyond), self._n_rounds)
        row_s = draft_row_seconds(round, self.constants.n_read_free)
        if row_s is not None and beyond <= 0:
            ratio = row_s / target_s
            self._measure(self._figure(self._c, source), ratio, among_others=among_others)

    def _measure(self, figure: _Figure, ratio: float, *, among_others: bool) -> None:
        """Add a measurement, unless it follows a plain round and others are known."""
        if among_others:
            figure.among_others_at = self._n_rounds
        last = figure.among_others_at
        if among_others or last is None or self._n_rounds - last > self.constants.n_fresh:
            figure.add(ratio, self._n_rounds)

    def _figure(self, figures: dict[Key, _Figure], key: Key) -> _Figure:
        return figures.setdefault(key, _Figure(self.constants.n_ratios))

    def _price(self, round: Round, target_s: float) -> RoundCost:
        if not round.draft.n_rows:
            # Tokens that the target reads again are a cost of the drafts before.
            n = round.times.target_s / target_s if round.n_reread else float(round.n_emitted)
            return RoundCost(RoundKind.PLAIN, n)
        reading = self._reading_of(round, target_s)
        spent = round.times.total_s / target_s - reading
        return RoundCost(RoundKind.DRAFTED, spent / (1 - self.rent(round.source)), reading)

    def _reading_of(self, round: Round, target_s: float) -> float:
        """Target tokens of time in which the drafter first read the text: no more than expected."""
        if round.draft.n_caught_up <= self.constants.n_read_free:
            return 0.0
        rows = round.draft.n_rows * self.c(round.source, full=True)
        beyond = max(0.0, round.times.draft_s / target_s - rows)
        return min(beyond, self.reading(round.source, round.draft.n_caught_up))

    def add_prompt(self, round: Round) -> None:
        """Take in the round that read the prompt."""
        read_s = round.times.verify_s / round.n_prompt
        self._read_s = min(read_s, self._read_s or read_s)

    def reading(self, source: str, n_tokens: int) -> float:
        """Target tokens of time in which a drafter reads ``n_tokens``: min(1, c) of the target's.

        The target's time is that of a token of the prompt, the least over the prompts so far.
        """
        if not self._read_s or not self._target_s:
            return 0.0
        return n_tokens * self._read_s * min(1.0, self.c(source, full=True)) / self._target_s

    def _is_setup(self, width: int) -> bool:
        """True for the first decode of a width over a link.

        It allocates on the other machine what later decodes of that width reuse.
        """
        first = width not in self._seen
        self._seen.add(width)
        return first and self.over_a_link

    @property
    def target_s(self) -> float | None:
        """Seconds of one target token alone in this run: the median of the last ones."""
        return self._target_s

    @property
    def complete(self) -> bool:
        """True once this run has timed the target, a draft and a wider decode."""
        return self.target_s is not None and bool(self._v) and bool(self._c)

    def longest_draft(self, source: str) -> int:
        """The most tokens whose cost can be guessed: ``wider`` times the widest measured width.

        One token until this run has timed the source, whatever earlier runs have measured.
        """
        if not self.complete or source not in self._c:
            return 1
        widest = max([*self._v, *self._kept.v])
        return min(MAX_N_DRAFT, int(self.constants.wider * widest) - 1)

    def c(self, source: str, *, full: bool = False) -> float:
        """Time of a draft row of this source over that of one target token.

        As believed, 0 if nothing is known; or at the ``full`` price, 1 if nothing is known.
        """
        figure = self._c.get(source)
        if figure is None:
            kept = self._kept.c.get(source, 1.0 if full else 0.0)
            return kept * self._fade(0, self.constants.n_fresh)  # also if full: it is a belief
        return figure.median * self._fade(figure.measured_at, self._n_half(full))

    def v(self, n: int, *, full: bool = False) -> float:
        """Time of a target decode of ``n`` rows over that of one row; as believed, or ``full``.

        The measured median, or the line between the measured neighbours. Beyond the widest measured
        width the belief is low, so that wider batches get tried.
        """
        if (n, full) not in self._v_estimated:
            if not self._curves:
                self._curves = self._draw_curves()
            # Nothing is known before the first draft of a pair, which has one token.
            curve, slope = self._curves[full], 1.0 if full else self.constants.slope_beyond
            v = interpolate_v(curve, n, slope_beyond=slope) if curve else 1.0
            self._v_estimated[n, full] = v
        return self._v_estimated[n, full]

    def restart(self, source: str) -> float:
        """What a draft of this source would cost now beyond its rows, in target tokens."""
        if not self.is_restart(source) or source not in self._restart:
            return 0.0
        beyond, measured_at = self._restart[source]
        return beyond * self._fade(measured_at, self._n_half(full=True))

    def rent(self, source: str) -> float:
        """Share of a target pass that drafts of this source cost by being in memory, below 1."""
        return self.rents.get(source, 0.0)

    def expect_restart(self, source: str, price: float) -> None:
        """Take note that the next draft of this source is a restart of this price."""
        self._restart[source] = (price, self._n_rounds)
        self._drafted_at.pop(source, None)

    def is_restart(self, source: str) -> bool:
        """True if this source has not drafted for more than ``n_pause`` rounds, or never."""
        drafted_at = self._drafted_at.get(source)
        return drafted_at is None or self._n_rounds - drafted_at > self.constants.n_pause

    def risk(self, source: str, n_draft: int, n_reread: int = 0) -> float:
        """What a draft of ``n_draft`` tokens loses if none is accepted, at the full price.

        The target reads ``n_reread`` tokens again in the same decode, with a draft or without. The
        rent is not in it, which a draft of any length costs.
        """
        alone = 1 + n_reread
        beyond = self.v(alone + n_draft, full=True) - self.v(alone, full=True)
        return self.restart(source) + n_draft * self.c(source, full=True) + beyond

    def _fade(self, measured_at: int, n_half: int) -> float:
        return float(0.5 ** ((self._n_rounds - measured_at) / n_half))

    def _n_half(self, full: bool) -> int:
        """Rounds in which a price fades to half: as believed, or at the full price."""
        return self.constants.n_price_fresh if full else self.constants.n_fresh

    def _forget_estimates(self) -> None:
        self._curves = {}
        self._v_estimated.clear()

    def _draw_curves(self) -> dict[bool, Mapping[int, float]]:
        """v by width, at the full price (True) and as believed. One by one, n rows cost n."""
        measured = {n: figure.median for n, figure in self._v.items()}
        known = {n: min(n, x) for n, x in {**self._bend_kept(measured), **measured}.items()}
        measured_at = {n: figure.measured_at for n, figure in self._v.items()}

        def faded(n_half: int) -> Mapping[int, float]:
            return {
                n: 1 + (x - 1) * self._fade(measured_at.get(n, 0), n_half) for n, x in known.items()
            }

        return {full: faded(self._n_half(full)) for full in (True, False)}

    def _bend_kept(self, measured: Mapping[int, float]) -> Mapping[int, float]:
        """v of earlier runs, scaled to go through the widest width that this run has measured."""
        if not self._kept.v or not measured:
            return self._kept.v
        widest = max(measured)
        before = interpolate_v(self._kept.v, widest) - 1
        scale = max(0.0, measured[widest] - 1) / before if before > 0 else 1.0
        return {n: 1 + (ratio - 1) * scale for n, ratio in self._kept.v.items()}

    def medians(self, n_least: int = 1) -> Costs:
        """What is known: c by source, v by number of rows, and the seconds of a target token.

        Those seconds are the last ones, or of earlier runs if this one has not timed a token.

        A ratio that was measured fewer than ``n_least`` times keeps the value of earlier runs, or
        is left out.
        """
        c = {source: figure.median for source, figure in self._c.items() if figure.n >= n_least}
        v = {width: figure.median for width, figure in self._v.items() if figure.n >= n_least}
        by_width = {**self._kept.v, **v}
        target_s = self.target_s or self._kept.target_s
        return Costs({**self._kept.c, **c}, dict(sorted(by_width.items())), target_s)
