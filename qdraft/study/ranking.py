"""The rungs of a quantization ladder, ranked: which pair to run, which single file, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qdraft.study.rung_result import ReferenceResult, RungResult

CLOSE = 0.02  # mean KL divergence up to which a file may stand in for the reference


@dataclass(frozen=True, slots=True)
class QuantFile:
    """One file of a ladder. ``name`` is the file's, or the type that was asked for."""

    name: str
    path: Path
    file_type: str
    n_bytes: int
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class Reference:
    """The file that the rungs are measured against."""

    file: QuantFile
    result: ReferenceResult


@dataclass(frozen=True, slots=True)
class Rung:
    """One quantization that was measured."""

    file: QuantFile
    result: RungResult


@dataclass(frozen=True, slots=True)
class FailedRung:
    """A quantization that could not be measured, and why."""

    name: str
    error: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Which pair and which single file to run (None: none is worth it), in names and sentences."""

    pair: str | None
    single: str | None
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ladder from the largest rung down, and what to make of it.

    ``complete`` is False if the comparison was interrupted.
    """

    reference: Reference
    rungs: tuple[Rung, ...]
    failed: tuple[FailedRung, ...]
    recommendation: Recommendation
    complete: bool = True

    @property
    def labels(self) -> dict[Path, str]:
        """Short names by path: the file's type if no other file has it, else the file's name."""
        files = [self.reference.file, *(rung.file for rung in self.rungs)]
        counts = Counter(file.file_type for file in files)
        return {
            file.path: file.file_type if counts[file.file_type] == 1 else file.path.stem
            for file in files
        }

    def doubts(self, today: str) -> list[str]:
        """What the rungs' benches doubt, and which figures were measured on another day."""
        names = self.labels
        sentences = sorted(
            {f"{names[rung.file.path]}: {d}" for rung in self.rungs for d in rung.result.doubts}
        )
        days = sorted({rung.result.measured["date"] for rung in self.rungs} - {today})
        if days:
            sentences.append(
                f"some figures were measured on {', '.join(days)} and come from the cache; --again "
                "measures them again"
            )
        return sentences


@dataclass(frozen=True, slots=True)
class _BestPair:
    """The rung with the highest mean speed-up as a draft; ``low`` is where its interval begins."""

    rung: Rung
    speedup: float
    low: float | None

    @property
    def is_shown(self) -> bool:
        """False if the interval includes a speed-up of 1 or less."""
        return self.low is None or self.low > 1


def conclude(
    reference: Reference, rungs: Sequence[Rung | FailedRung], *, complete: bool = True
) -> Comparison:
    """Rank the rungs: the fastest pair, and the fastest file that can stand in for the reference.

    ``rungs`` may come in any order and may be empty.
    """
    measured = sorted(
        (rung for rung in rungs if isinstance(rung, Rung)), key=lambda rung: -rung.file.n_bytes
    )
    failed = tuple(rung for rung in rungs if isinstance(rung, FailedRung))
    return Comparison(reference, tuple(measured), failed, _recommend(reference, measured), complete)


def _recommend(reference: Reference, rungs: Sequence[Rung]) -> Recommendation:
    if not rungs:
        return Recommendation(None, None, ("nothing was measured",))
    pair, single = _best_pair(rungs), _best_single(rungs)
    name = reference.file.name
    words = [_pair_sentence(name, pair), _single_sentence(name, single)]
    if pair and not pair.is_shown:
        pair = None
    if pair and single and single.result.speedup_alone > pair.speedup:
        words.append("the single file is faster, the pair is exact")
    return Recommendation(
        pair.rung.file.name if pair else None, single.file.name if single else None, tuple(words)
    )


def _best_pair(rungs: Sequence[Rung]) -> _BestPair | None:
    """The draft with the highest measured speed-up, if above 1. All temperatures count alike."""
    best: _BestPair | None = None
    for rung in rungs:
        ratios = [draft.measured for draft in rung.result.as_draft if draft.measured]
        if not ratios:
            continue
        speedup = sum(ratio.value for ratio in ratios) / len(ratios)
        lows = [ratio.low for ratio in ratios if ratio.low is not None]
        low = min(lows) if len(lows) == len(ratios) else None
        if speedup > (best.speedup if best else 1):
            best = _BestPair(rung, speedup, low)
    return best


def _best_single(rungs: Sequence[Rung]) -> Rung | None:
    """The fastest of the files that are close to the reference and faster than it."""
    close = [
        rung
        for rung in rungs
        if rung.result.quality.kld.value <= CLOSE and rung.result.speedup_alone > 1
    ]
    return max(close, key=lambda rung: rung.result.speedup_alone, default=None)


def _pair_sentence(reference: str, best: _BestPair | None) -> str:
    if best is None:
        return (
            f"pair: none of these drafts pays off for {reference} on this machine: run it alone, "
            "or choose a bigger target"
        )
    draft = best.rung.file.name
    if not best.is_shown:
        return (
            f"pair: {draft} is the fastest of these drafts at {best.speedup:.2f} times {reference} "
            f"alone, but its interval begins at {best.low:.2f}: no draft is shown to pay off on "
            "this machine"
        )
    interval = "" if best.low is None else f" (at least {best.low:.2f} by its interval)"
    return (
        f"pair: {reference} with {draft} as its draft is {best.speedup:.2f} times as fast as "
        f"{reference} alone{interval}, with the same output distribution"
    )


def _single_sentence(reference: str, best: Rung | None) -> str:
    if best is None:
        return (
            f"single file: no file is both faster than {reference} and close to it (mean KLD up "
            f"to {CLOSE})"
        )
    quality = best.result.quality
    return (
        f"single file: {best.file.name} alone is {best.result.speedup_alone:.2f} times as fast as "
        f"{reference}, but it is another model: mean KLD {quality.kld.value:.4f}, the same top "
        f"token at {100 * quality.same_top.value:.1f} % of positions"
    )
