"""Rounds folded into a summary: counts, rates, times, and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from qdraft.core.costmodel import break_even_alpha
from qdraft.types import Round


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one text.

    The prompt's round, which emits the first token, is timed apart (``prompt_s``):
    ``draft_s``, ``verify_s``, ``other_s`` and ``tokens_per_second`` cover the same
    interval and the same tokens, those after the first. None where nothing was measured.

    ``alpha`` = n_accepted / n_tested, ``draft_yield`` = n_accepted / n_drafted, ``tau`` =
    tokens emitted per round, over the rounds with a draft. ``accepted_histogram[i]`` counts
    those rounds by tokens accepted. ``target_tokens_per_second`` is the target alone, from
    the rounds without a draft. ``c`` and ``v`` (by number of rows) are in units of one
    target token.
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
    ttft_s: float | None
    prompt_s: float
    draft_s: float
    verify_s: float
    other_s: float
    tokens_per_second: float | None
    target_tokens_per_second: float | None
    speedup: float | None
    c: float | None
    v: dict[int, float]
    verdict: str | None


def summarize(rounds: Sequence[Round], ttft_s: float | None = None) -> Summary:
    """Fold rounds, in order, into a Summary."""
    later = [r for r in rounds if not r.n_prompt]
    drafted = [r for r in later if r.n_draft]
    plain = [r for r in later if not r.n_draft and not r.dropped]
    n_drafted = sum(r.n_draft for r in drafted)
    n_tested = sum(r.n_tested for r in drafted)
    n_accepted = sum(r.n_accepted for r in drafted)
    histogram = [0] * (1 + max((r.n_accepted for r in drafted), default=-1))
    for r in drafted:
        histogram[r.n_accepted] += 1
    later_s = sum(r.draft_s + r.verify_s + r.other_s for r in later)
    rate = _ratio(sum(r.n_emitted for r in later), later_s)
    alone = (
        _ratio(1.0, median(r.draft_s + r.verify_s + r.other_s for r in plain)) if plain else None
    )
    alpha = _ratio(n_accepted, n_tested)
    c, v = _costs(drafted, plain)
    gain = rate / alone if rate and alone and drafted else None
    return Summary(
        n_prompt=sum(r.n_prompt for r in rounds),
        n_tokens=sum(r.n_emitted for r in rounds),
        n_rounds=len(rounds),
        n_drafted=n_drafted,
        n_tested=n_tested,
        n_accepted=n_accepted,
        n_dropped=sum(r.dropped for r in rounds),
        alpha=alpha,
        draft_yield=_ratio(n_accepted, n_drafted),
        tau=_ratio(sum(r.n_emitted for r in drafted), len(drafted)),
        accepted_histogram=tuple(histogram),
        ttft_s=ttft_s,
        prompt_s=sum(r.draft_s + r.verify_s + r.other_s for r in rounds if r.n_prompt),
        draft_s=sum(r.draft_s for r in later),
        verify_s=sum(r.verify_s for r in later),
        other_s=sum(r.other_s for r in later),
        tokens_per_second=rate,
        target_tokens_per_second=alone,
        speedup=gain,
        c=c,
        v=v,
        verdict=_verdict(gain, alone, alpha, c, v) if drafted else None,
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _costs(
    drafted: Sequence[Round], plain: Sequence[Round]
) -> tuple[float | None, dict[int, float]]:
    """c and v(n) from medians: the first draft, which reads the prompt, does not count."""
    one = median(r.verify_s for r in plain) if plain else 0.0
    if not (one and drafted):
        return None, {}
    by_width: dict[int, list[float]] = {}
    for r in drafted:
        by_width.setdefault(r.n_draft + 1, []).append(r.verify_s)
    c = median(r.draft_s / r.n_draft for r in drafted) / one
    return c, {width: median(times) / one for width, times in sorted(by_width.items())}


def _verdict(
    gain: float | None,
    alone: float | None,
    alpha: float | None,
    c: float | None,
    v: dict[int, float],
) -> str:
    """One sentence: does the draft pay here, and if not, what would have to change."""
    if gain is None or alone is None or alpha is None or c is None:
        return "too short a text to compare with the target alone"
    sentence = f"{gain:.2f} times the target alone ({alone:.1f} t/s)"
    if gain >= 1:
        return sentence
    needed = {width: break_even_alpha(width - 1, c, cost) for width, cost in v.items()}
    reachable = {alpha: width for width, alpha in needed.items() if alpha is not None}
    costs = f"a draft token costs {c:.2f} target tokens"
    if reachable:
        best = min(reachable)
        width = reachable[best]
        return (
            f"{sentence}: {costs}, {width} rows cost {v[width]:.2f}; "
            f"n_draft {width - 1} pays from alpha {best:.2f}, here it is {alpha:.2f}"
        )
    width = min(v, key=lambda w: v[w] + (w - 1) * c - w)
    return (
        f"{sentence}: {costs}, {width} rows cost {v[width]:.2f}, so no acceptance rate would "
        "pay; it takes a bigger target or a cheaper draft (see --no-draft)"
    )
