"""Rounds folded into a summary: counts, rates, times, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.model import break_even_alpha, expected_tokens
from qdraft.decoding.records import Round

_MANY = 16  # rounds after which hardly any draft means that the schedule saw no gain in it
_GRAM = 8  # tokens of an n-gram that does not come back by chance
NOISY = 1.5  # spread from which times say little
CIRCLES = 0.3  # share of repeated n-grams from which acceptance says little
_SPIKE = 2.0  # times the usual, from which a decode was disturbed
_ENOUGH = 4  # rounds with a draft, below which a verdict says more than is known


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one text.

    The prompt's round, which emits the first token, is timed apart (``prompt_s``):
    ``draft_s``, ``verify_s``, ``other_s`` and ``tokens_per_second`` cover the same
    interval and the same tokens, those after the first. None where nothing was measured.

    ``alpha`` = n_accepted / n_tested, ``draft_yield`` = n_accepted / n_drafted, ``tau`` =
    tokens emitted per round, over the rounds with a draft. ``accepted_histogram[i]`` counts
    those rounds by tokens accepted, ``sources`` has the three counts of each source of drafts.
    ``target_tokens_per_second`` is the target alone, from
    the rounds without a draft; ``speedup`` is total against total, with decodes that took more
    than twice the median of their width counted as that, because a disturbance that hits one of a
    few rounds without a draft would pass for a gain. ``c`` and ``v`` (by number of rows) are in
    units of one target token; ``predicted_speedup`` is what the cost model makes of them, alpha
    and the draft lengths of this text (``decoding.policy.model``). ``spread`` is how long the
    slowest tenth of the target's decodes took over their median, at equal numbers of rows: near 1
    on a machine that does nothing else. ``repetition`` is the share of this text's 8-grams that
    had been in it before: near 1 where it runs in circles, which flatters any draft.
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
    verdict: str | None


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
    plain = [r for r in later if not r.n_draft]
    n_drafted = sum(r.n_draft for r in drafted)
    n_tested = sum(r.n_tested for r in drafted)
    n_accepted = sum(r.n_accepted for r in drafted)
    histogram = [0] * (1 + max((r.n_accepted for r in drafted), default=-1))
    for r in drafted:
        histogram[r.n_accepted] += 1
    rate = _ratio(sum(r.n_emitted for r in later), sum(r.times.total_s for r in later))
    # What a drafter spent before it offered nothing is not the target's time.
    one = median(r.times.verify_s + r.times.other_s for r in plain) if plain else 0.0
    usual = {n: median(times) for n, times in _times_by_width(later).items()}
    alone = _ratio(len(plain), sum(_settled(r, usual) for r in plain))
    timed = drafted
    if costs and costs.over_a_link and costs.target_s:
        # Without what the first decode of each width sets up there.
        one, alone = costs.target_s, 1 / costs.target_s
        timed = [r for i, r in enumerate(drafted) if r.n_draft in {d.n_draft for d in drafted[:i]}]
    settled = _ratio(
        sum(r.n_emitted for r in later), sum(r.times.draft_s + _settled(r, usual) for r in later)
    )
    alpha = _ratio(n_accepted, n_tested)
    c = _c([r for r in later if source in (None, r.source)], one)
    v = {} if c is None else _v(timed, one)
    if costs:
        known = costs.medians()
        c = known.c.get(source) if c is None and source else c
        v = dict(sorted({**known.v, **v}.items()))
    gain = settled / alone if settled and alone and drafted else None
    return Summary(
        n_prompt=sum(r.n_prompt for r in rounds),
        n_tokens=sum(r.n_emitted for r in rounds),
        n_rounds=len(rounds),
        n_drafted=n_drafted,
        n_tested=n_tested,
        n_accepted=n_accepted,
        n_dropped=sum(r.draft.dropped for r in rounds),
        alpha=alpha,
        draft_yield=_ratio(n_accepted, n_drafted),
        tau=_ratio(sum(r.n_emitted for r in drafted), len(drafted)),
        accepted_histogram=tuple(histogram),
        sources=_by_source(drafted),
        ttft_s=ttft_s,
        prompt_s=sum(r.times.total_s for r in rounds if r.n_prompt),
        draft_s=sum(r.times.draft_s for r in later),
        verify_s=sum(r.times.verify_s for r in later),
        other_s=sum(r.times.other_s for r in later),
        tokens_per_second=rate,
        target_tokens_per_second=alone,
        speedup=gain,
        predicted_speedup=_predicted(later, alpha, one, costs, v),
        c=c,
        v=v,
        spread=_spread(later),
        repetition=_repetition([token for r in rounds for token in r.tokens]),
        verdict=_verdict(len(drafted), len(later), gain, alone, alpha, c, v, source),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _by_source(drafted: Sequence[Round]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for r in drafted:
        of = counts.setdefault(r.source, {"n_drafted": 0, "n_tested": 0, "n_accepted": 0})
        of["n_drafted"] += r.n_draft
        of["n_tested"] += r.n_tested
        of["n_accepted"] += r.n_accepted
    return counts


def _c(rounds: Sequence[Round], one: float) -> float | None:
    """c from the median draft row, leaving out drafts that first had to read a part of the text."""
    rows = [
        r.times.draft_s / r.draft.n_rows
        for r in rounds
        if r.draft.n_rows and r.draft.n_caught_up <= CONSTANTS.n_read_free
    ]
    return median(rows) / one if one and rows else None


def _v(drafted: Sequence[Round], one: float) -> dict[int, float]:
    """v(n) from the median decode of each number of rows."""
    return {n + 1: median(t) / one for n, t in sorted(_times_by_width(drafted).items())}


def _times_by_width(rounds: Sequence[Round]) -> dict[int, list[float]]:
    """Seconds of the target's part of each round, by number of draft tokens."""
    times: dict[int, list[float]] = {}
    for r in rounds:
        times.setdefault(r.n_draft, []).append(r.times.verify_s + r.times.other_s)
    return times


def _settled(round: Round, usual: dict[int, float]) -> float:
    """Seconds of the target's part of a round, at most ``_SPIKE`` times what is usual for it."""
    return min(round.times.verify_s + round.times.other_s, _SPIKE * usual[round.n_draft])


def _predicted(
    later: Sequence[Round],
    alpha: float | None,
    one: float,
    costs: CostTable | None,
    v: dict[int, float],
) -> float | None:
    """Expected tokens of these rounds over their expected time, in target tokens."""
    if alpha is None:
        return None
    sources = {r.source for r in later if r.draft.n_rows}
    c = {s: costs.c(s) if costs else _c([r for r in later if r.source == s], one) for s in sources}
    tokens = time = 0.0
    for r in later:
        row = c[r.source] if r.draft.n_rows else 0.0
        rows = v.get(r.n_draft + 1) if r.n_draft else 1.0
        if rows is None or row is None:
            return None
        tokens += expected_tokens(alpha, r.n_draft)
        time += r.draft.n_rows * row + rows
    return _ratio(tokens, time)


def _spread(later: Sequence[Round]) -> float | None:
    """The ninth decile of verify times over the median of their width; None from too few."""
    by_width: dict[int, list[float]] = {}
    for r in later:
        by_width.setdefault(r.n_draft, []).append(r.times.verify_s)
    typical = {n: median(times) for n, times in by_width.items() if len(times) >= _MANY // 2}
    ratios = [r.times.verify_s / typical[r.n_draft] for r in later if typical.get(r.n_draft)]
    return quantiles(ratios, n=10)[-1] if len(ratios) >= _MANY else None


def _repetition(tokens: Sequence[int]) -> float | None:
    """Share of the n-grams of a text that stood in it before; None for a short text."""
    grams = [tuple(tokens[i : i + _GRAM]) for i in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if len(grams) >= 4 * _GRAM else None


def _verdict(
    n_drafted: int,
    n_later: int,
    gain: float | None,
    alone: float | None,
    alpha: float | None,
    c: float | None,
    v: dict[int, float],
    source: str | None,
) -> str | None:
    """One sentence: does the draft pay here, and if not, what would have to change."""
    if n_drafted < _ENOUGH:
        if source == "ngram":
            return "this text hardly repeats itself" if n_later >= _MANY else None
        if c and v and n_later >= _MANY:
            return f"drafting does not pay here: {_what_would(alpha, c, v)}"
        return "too short a text to compare with the target alone" if n_drafted else None
    if gain is None or alone is None:
        return "too short a text to compare with the target alone"
    sentence = f"{gain:.2f} times the target alone ({alone:.1f} t/s)"
    return sentence if gain >= 1 or c is None else f"{sentence}: {_what_would(alpha, c, v)}"


def _what_would(alpha: float | None, c: float, v: dict[int, float]) -> str:
    """The costs, and the acceptance rate that would pay at the most favourable width."""
    needed = {width: break_even_alpha(width - 1, c, cost) for width, cost in v.items()}
    reachable = {a: width for width, a in needed.items() if a is not None}
    costs = f"a draft token costs {c:.2f} target tokens"
    if reachable:
        best = min(reachable)
        width = reachable[best]
        here = "" if alpha is None else f", here it is {alpha:.2f}"
        return (
            f"{costs}, {width} rows cost {v[width]:.2f}; "
            f"n_draft {width - 1} pays from alpha {best:.2f}{here}"
        )
    width = min(v, key=lambda w: v[w] + (w - 1) * c - w)
    return (
        f"{costs}, {width} rows cost {v[width]:.2f}, so no acceptance rate would pay; "
        "it takes a bigger target or a cheaper draft"
    )
