"""Rounds folded into a summary: counts, rates, times, and a conclusion in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles

from qdraft.decoding.drafters.kinds import only_repeats
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.model import break_even_alpha, expected_tokens
from qdraft.decoding.rates import (
    count,
    count_by_source,
    draft_cost,
    ratio,
    target_seconds,
    target_times,
    verify_costs,
)
from qdraft.decoding.records import Round

NOISY = 1.5  # spread above which times mean little
CIRCLES = 0.3  # repetition above which acceptance means little
_MANY = 16  # rounds: if hardly any of so many has a draft, the schedule sees no gain in drafting
_ENOUGH = 4  # rounds with a draft, below which there are too few to conclude from
_GRAM = 8  # tokens of an n-gram that does not come back by chance
_SPIKE = 2.0  # times the usual seconds, above which a decode was disturbed
_TOO_SHORT = "this text is too short to compare with the target alone"


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one text.

    The round of the prompt, which emits the first token, is timed apart (``prompt_s``):
    ``draft_s``, ``verify_s``, ``other_s`` and ``tokens_per_second`` cover the same interval and
    the same tokens, those after the first. A figure is None if nothing was measured.

    ``alpha``, ``draft_yield``, ``tau``, ``c`` and ``v`` (by number of rows) are defined in
    ``decoding.rates``. ``accepted_histogram[i]`` counts the rounds with a draft of which i tokens
    were accepted, ``sources`` has three counts for each source of drafts.

    ``target_tokens_per_second`` is the speed of the target alone, from the rounds without a
    draft. ``speedup`` divides totals by totals. A decode that took more than twice the median of
    its width counts as twice that, because one disturbance among a few rounds without a draft
    would pass for a gain. ``predicted_speedup`` is the speed-up that the cost model
    (``decoding.policy.model``) computes from c, v, alpha and the draft lengths of this text.

    ``spread`` is the ninth decile of the target's decodes over their median, at equal numbers of
    rows: near 1 on an idle machine. ``repetition`` is the share of this text's 8-grams that
    occurred before in it: near 1 in a text that runs in circles, which favours any draft.
    """

    n_prompt: int
    n_tokens: int
    n_rounds: int
    n_drafted: int
    n_tested: int
    n_accepted: int
    n_dropped: int
    alpha: float | None
    draft_yield: float | None
    tau: float | None
    accepted_histogram: tuple[int, ...]
    sources: dict[str, dict[str, int]]
    ttft_s: float | None
    prompt_s: float
    draft_s: float
    verify_s: float
    other_s: float
    tokens_per_second: float | None
    target_tokens_per_second: float | None
    speedup: float | None
    predicted_speedup: float | None
    c: float | None
    v: dict[int, float]
    spread: float | None
    repetition: float | None
    conclusion: str | None

    @property
    def is_comparable(self) -> bool:
        """Tell whether the text has enough drafts to compare its speed with the target alone."""
        return self.speedup is not None and sum(self.accepted_histogram) >= _ENOUGH

    @property
    def doubts(self) -> list[str]:
        """Sentences: what makes the figures less certain than they look."""
        doubts = []
        if self.spread and self.spread > NOISY:
            doubts.append(
                f"the slowest tenth of the target's decodes took {self.spread:.1f} times the "
                "median: another program is using this machine, so the times are uncertain"
            )
        if self.repetition and self.repetition > CIRCLES:
            doubts.append(
                f"{self.repetition:.0%} of this text repeats itself, which favours any draft"
            )
        return doubts


def summarize(
    rounds: Sequence[Round],
    ttft_s: float | None = None,
    costs: CostTable | None = None,
    source: str | None = None,
) -> Summary:
    """Fold rounds, in order, into a Summary.

    ``costs`` fills in what the rounds do not show of c and v. c is that of ``source``, or of
    all sources together.
    """
    later = [r for r in rounds if not r.n_prompt]
    drafted = [r for r in later if r.n_draft]
    counts = count(later)
    speeds = _speeds(later, costs)
    c, v = _costs(later, speeds.target_s, costs, source)
    summary = Summary(
        n_prompt=sum(r.n_prompt for r in rounds),
        n_tokens=sum(r.n_emitted for r in rounds),
        n_rounds=len(rounds),
        n_drafted=counts.n_drafted,
        n_tested=counts.n_tested,
        n_accepted=counts.n_accepted,
        n_dropped=sum(r.draft.dropped for r in rounds),
        alpha=counts.alpha,
        draft_yield=counts.draft_yield,
        tau=counts.tau,
        accepted_histogram=_histogram([r.n_accepted for r in drafted]),
        sources=_by_source(drafted),
        ttft_s=ttft_s,
        prompt_s=sum(r.times.total_s for r in rounds if r.n_prompt),
        draft_s=sum(r.times.draft_s for r in later),
        verify_s=sum(r.times.verify_s for r in later),
        other_s=sum(r.times.other_s for r in later),
        tokens_per_second=speeds.ours,
        target_tokens_per_second=speeds.alone,
        speedup=speeds.speedup,
        predicted_speedup=_predict(later, counts.alpha, speeds.target_s, costs, v),
        c=c,
        v=v,
        spread=_spread(later),
        repetition=_repetition([token for r in rounds for token in r.tokens]),
        conclusion=None,
    )
    return replace(summary, conclusion=_conclude(summary, len(later), source))


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Tokens per second with drafts and alone; ``target_s`` are the seconds of a token alone."""

    ours: float | None
    alone: float | None
    speedup: float | None
    target_s: float | None


def _speeds(later: Sequence[Round], costs: CostTable | None) -> _Speeds:
    plain = [r for r in later if r.n_rows == 1]
    usual = {width: median(times) for width, times in target_times(later).items()}

    def settled(r: Round) -> float:
        """Seconds of the target's part, at most ``_SPIKE`` times what is usual for its width."""
        return min(r.times.target_s, _SPIKE * usual[r.n_rows])

    n_tokens = sum(r.n_emitted for r in later)
    target_s = target_seconds(later)
    alone = ratio(len(plain), sum(settled(r) for r in plain))
    if costs and costs.target_s and (costs.over_a_link or not plain):
        # Over a link the first decode of each width sets up buffers: the table leaves it out. And
        # where every round drafts, the table knows the target alone from loading or other texts.
        target_s, alone = costs.target_s, 1 / costs.target_s
    ours = ratio(n_tokens, sum(r.times.draft_s + settled(r) for r in later))
    return _Speeds(
        ours=ratio(n_tokens, sum(r.times.total_s for r in later)),
        alone=alone,
        speedup=ours / alone if ours and alone and len(plain) < len(later) else None,
        target_s=target_s,
    )


def _costs(
    later: Sequence[Round], target_s: float | None, costs: CostTable | None, source: str | None
) -> tuple[float | None, dict[int, float]]:
    """c of ``source`` and v, from the rounds, completed by ``costs``."""
    c = draft_cost([r for r in later if source in (None, r.source)], target_s)
    timed = [r for r in later if r.n_rows > 1]
    if costs and costs.over_a_link and costs.target_s:
        timed = [r for i, r in enumerate(timed) if r.n_rows in {d.n_rows for d in timed[:i]}]
    v = {} if c is None else verify_costs(timed, target_s)
    if costs:
        known = costs.medians()
        c = known.c.get(source) if c is None and source else c
        v = dict(sorted({**known.v, **v}.items()))
    return c, v


def _histogram(n_accepted: Sequence[int]) -> tuple[int, ...]:
    """How many rounds had 0, 1, ... draft tokens accepted."""
    return tuple(n_accepted.count(n) for n in range(1 + max(n_accepted, default=-1)))


def _by_source(drafted: Sequence[Round]) -> dict[str, dict[str, int]]:
    """Three counts of the rounds of each source, in the order in which the sources drafted."""
    names = ("n_drafted", "n_tested", "n_accepted")
    sources: dict[str, dict[str, int]] = {}
    for r in drafted:
        for source, *counts in count_by_source(r):
            of_source = sources.setdefault(source, dict.fromkeys(names, 0))
            for name, n in zip(names, counts, strict=True):
                of_source[name] += n
    return sources


def _predict(
    later: Sequence[Round],
    alpha: float | None,
    target_s: float | None,
    costs: CostTable | None,
    v: dict[int, float],
) -> float | None:
    """Expected tokens of these rounds over their expected time, in target tokens."""
    if alpha is None:
        return None
    c: dict[str, float | None] = {"": 0.0}
    for source in {r.source for r in later if r.draft.n_rows}:
        of_source = [r for r in later if r.source == source]
        c[source] = costs.c(source) if costs else draft_cost(of_source, target_s)
    tokens = time = 0.0
    for r in later:
        row_cost = c[r.source] if r.draft.n_rows else 0.0
        verify_cost = v.get(r.n_rows) if r.n_rows > 1 else 1.0
        if verify_cost is None or row_cost is None:
            return None
        tokens += expected_tokens(alpha, r.n_draft)
        time += r.draft.n_rows * row_cost + verify_cost
    return ratio(tokens, time)


def _spread(later: Sequence[Round]) -> float | None:
    """The ninth decile of verify times over the median of their width; None for too few rounds."""
    by_width: dict[int, list[float]] = {}
    for r in later:
        by_width.setdefault(r.n_rows, []).append(r.times.verify_s)
    typical = {n: median(times) for n, times in by_width.items() if len(times) >= _MANY // 2}
    ratios = [r.times.verify_s / typical[r.n_rows] for r in later if typical.get(r.n_rows)]
    return quantiles(ratios, n=10)[-1] if len(ratios) >= _MANY else None


def _repetition(tokens: Sequence[int]) -> float | None:
    """The share of the n-grams of a text that occurred before in it; None for a short text."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= 4 * _GRAM else None


def _conclude(summary: Summary, n_later: int, source: str | None) -> str | None:
    """One sentence: does the draft pay off here, and if not, what would have to change?"""
    c, v, alpha = summary.c, summary.v, summary.alpha
    n_drafted = sum(summary.accepted_histogram)
    if n_drafted < _ENOUGH:
        if only_repeats(source):
            return "this text hardly repeats itself" if n_later >= _MANY else None
        if c and v and n_later >= _MANY:
            return f"drafting does not pay off here: {_what_would(alpha, c, v)}"
        return _TOO_SHORT if n_drafted else None
    if summary.speedup is None:
        return _TOO_SHORT
    sentence = (
        f"{summary.speedup:.2f} times the target alone ({summary.target_tokens_per_second:.1f} t/s)"
    )
    if summary.speedup >= 1 or c is None:
        return sentence
    return f"{sentence}: {_what_would(alpha, c, v)}"


def _what_would(alpha: float | None, c: float, v: dict[int, float]) -> str:
    """The costs, and the acceptance rate that would pay off at the most favourable width."""
    needed = {width: break_even_alpha(width - 1, c, cost) for width, cost in v.items()}
    reachable = {a: width for width, a in needed.items() if a is not None}
    costs = f"a draft token costs {c:.2f} target tokens"
    if reachable:
        best = min(reachable)
        width = reachable[best]
        # A rate from a few tokens may be above it by chance: then it explains nothing.
        here = f", here it is {alpha:.2f}" if alpha is not None and alpha < best else ""
        return (
            f"{costs}, {width} rows cost {v[width]:.2f}; "
            f"n_draft {width - 1} pays off from alpha {best:.2f}{here}"
        )
    width = min(v, key=lambda w: v[w] + (w - 1) * c - w)
    return (
        f"{costs}, {width} rows cost {v[width]:.2f}, so no acceptance rate would pay off; "
        "it takes a bigger target or a cheaper draft"
    )
