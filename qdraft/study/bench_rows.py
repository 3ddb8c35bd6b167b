"""Samples of a bench folded into rows with intervals, doubts, and a conclusion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from qdraft.decoding.intervals import Ratio, TimedText, speed, speed_ratio
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.rates import Counts, alpha_by_place, ratio
from qdraft.decoding.summary import CIRCLES, NOISY
from qdraft.study.bench import Sample, Written


@dataclass(frozen=True, slots=True)
class BenchRow:
    """Samples taken together. ``kind`` and ``temperature`` are None if they are mixed.

    ``n_prompt`` is the mean length of the prompts. Speeds are total tokens over total seconds
    after the first token. ``predicted`` is the cost model's speed-up for the same rounds.
    ``alpha_at[i]`` is the acceptance rate at place i.
    """

    kind: str | None
    temperature: float | None
    n_texts: int
    n_prompt: float
    n_tokens: int
    alone_per_second: float | None
    per_second: float | None
    speedup: Ratio | None
    predicted: float | None
    alone_ttft_s: float
    ttft_s: float
    n_drafted: int
    n_tested: int
    n_accepted: int
    alpha: float | None
    draft_yield: float | None
    tau: float | None
    alpha_at: tuple[float | None, ...]
    rounds_by_accepted: tuple[int, ...]
    sources: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Bench:
    """The results of one bench: rows by kind and temperature, costs, doubts, a conclusion.

    ``c`` (by source) and ``v`` (by number of rows) are in target tokens of ``target_s`` seconds.
    ``complete`` is False if the bench was interrupted.
    """

    rows: tuple[BenchRow, ...]
    by_kind: tuple[BenchRow, ...]
    by_temperature: tuple[BenchRow, ...]
    total: BenchRow
    target_s: float | None
    c: dict[str, float]
    v: dict[int, float]
    doubts: tuple[str, ...]
    conclusion: str
    complete: bool


def fold(samples: Sequence[Sample], costs: Costs, *, complete: bool = True) -> Bench:
    """Fold samples (at least one, in any order) into rows with intervals, and conclude."""
    total = _row(samples)
    noise = _noise(samples)
    doubts = [noise, _circles(samples)]
    return Bench(
        rows=_rows(samples, lambda s: (s.kind, s.temperature)),
        by_kind=_rows(samples, lambda s: (s.kind, None)),
        by_temperature=_rows(samples, lambda s: (None, s.temperature)),
        total=total,
        target_s=costs.target_s,
        c=dict(costs.c),
        v=dict(costs.v),
        doubts=tuple(doubt for doubt in doubts if doubt),
        conclusion=_conclude(total, noisy=noise is not None),
        complete=complete,
    )


def _rows(
    samples: Sequence[Sample], key: Callable[[Sample], tuple[str | None, float | None]]
) -> tuple[BenchRow, ...]:
    order = list(dict.fromkeys(key(s) for s in samples))
    grouped = groupby(sorted(samples, key=lambda s: order.index(key(s))), key)
    return tuple(_row(list(group), *group_key) for group_key, group in grouped)


def _row(
    samples: Sequence[Sample], kind: str | None = None, temperature: float | None = None
) -> BenchRow:
    ours, alone = [s.ours for s in samples], [s.alone for s in samples]
    tested, accepted = _sums(s.tested_at for s in samples), _sums(s.accepted_at for s in samples)
    counts = sum((s.counts for s in samples), Counts())
    expected = [(s.ours.n_tokens, s.ours.n_tokens / s.predicted) for s in samples if s.predicted]
    return BenchRow(
        kind=kind,
        temperature=temperature,
        n_texts=len(samples),
        n_prompt=sum(s.n_prompt for s in samples) / len(samples),
        n_tokens=sum(w.n_tokens for w in ours),
        alone_per_second=speed([w.timed for w in alone]),
        per_second=speed([w.timed for w in ours]),
        speedup=_speedup_by_prompt(samples),
        predicted=ratio(sum(n for n, _ in expected), sum(t for _, t in expected)),
        alone_ttft_s=median(w.ttft_s for w in alone),
        ttft_s=median(w.ttft_s for w in ours),
        n_drafted=counts.n_drafted,
        n_tested=counts.n_tested,
        n_accepted=counts.n_accepted,
        alpha=counts.alpha,
        draft_yield=counts.draft_yield,
        tau=counts.tau,
        alpha_at=alpha_by_place(tested, accepted),
        rounds_by_accepted=_sums(s.rounds_by_accepted for s in samples),
        sources=_sum_sources(samples),
    )


def _speedup_by_prompt(samples: Sequence[Sample]) -> Ratio | None:
    """The ratio with its interval over prompts.

    Repeats and temperatures of one prompt count as one text: they are not new tasks.
    """
    prompts: dict[tuple[str, int], list[Sample]] = {}
    for s in samples:
        prompts.setdefault((s.kind, s.prompt), []).append(s)

    def together(written: Sequence[Written]) -> TimedText:
        return TimedText(sum(w.n_tokens for w in written), sum(w.seconds for w in written))

    return speed_ratio(
        [together([s.ours for s in of_prompt]) for of_prompt in prompts.values()],
        [together([s.alone for s in of_prompt]) for of_prompt in prompts.values()],
    )


def _sum_sources(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    """The counts of each source of drafts, over all samples."""
    sums: dict[str, dict[str, int]] = {}
    for s in samples:
        for source, counts in s.sources.items():
            of_source = sums.setdefault(source, dict.fromkeys(counts, 0))
            for name, n in counts.items():
                of_source[name] += n
    return sums


def _sums(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Sums element by element; a shorter tuple counts as zero beyond its end."""
    sums: list[int] = []
    for of_sample in counts:
        sums += [0] * (len(of_sample) - len(sums))
        for i, n in enumerate(of_sample):
            sums[i] += n
    return tuple(sums)


def _noise(samples: Sequence[Sample]) -> str | None:
    spreads = [s.spread for s in samples if s.spread]
    if not spreads or median(spreads) <= NOISY:
        return None
    return (
        f"the machine was noisy: the slowest tenth of decodes took {median(spreads):.1f} times "
        "their median"
    )


def _circles(samples: Sequence[Sample]) -> str | None:
    n_circles = sum((s.repetition or 0) > CIRCLES for s in samples)
    if not n_circles:
        return None
    return f"{n_circles} of {len(samples)} texts repeat themselves, which favours any draft"


def _conclude(total: BenchRow, *, noisy: bool) -> str:
    """Whether drafting pays off, if the interval and the noise allow a conclusion."""
    speedup = total.speedup
    if speedup is None or speedup.low is None or speedup.high is None:
        return (
            "too few prompts to conclude (at least 4 are needed): give more with --per-kind 2 or "
            "--prompts"
        )
    figures = (
        f"{speedup.value:.2f} times the target alone ({speedup.low:.2f} to {speedup.high:.2f})"
    )
    if noisy:
        return f"{figures}, but the machine was too noisy to conclude"
    if not speedup.decided:
        return (
            f"{figures}: not decided; more prompts, longer texts (--n-predict) or a quieter "
            "machine would narrow the interval"
        )
    if speedup.even:
        return f"drafting makes no difference: {figures}"
    return f"drafting {'pays off' if speedup.low > 1 else 'does not pay off'}: {figures}"
