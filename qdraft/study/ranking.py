"""The rungs of a quantization ladder, ranked: which pair to run, which single file, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CLOSE = 0.02  # mean KL divergence up to which a file may stand in for the reference


@dataclass(frozen=True, slots=True)
class Measured:
    """A rung and what was found; ``error`` in its place where it could not be measured."""

    name: str
    path: Path
    file_type: str
    n_bytes: int
    bits_per_weight: float
    found: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The ladder, from the largest rung down, and what to make of it."""

    reference: Measured
    rows: tuple[Measured, ...]
    recommendation: Recommendation
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Which pair, which single file, and why; None where none is worth it."""

    pair: str | None
    single: str | None
    words: tuple[str, ...]


def conclude(reference: Measured, rows: Sequence[Measured], *, complete: bool = True) -> Comparison:
    """Rank what was measured: the fastest pair, and the fastest file that stands in alone."""
    whole = [row for row in rows if not row.error]
    words: list[str] = []
    base = reference.name
    best_pair, best_single = _best_pair(whole), _best_single(whole)
    if best_pair and best_pair[2] is not None and best_pair[2] <= 1:
        row, speed, low = best_pair
        words.append(
            f"pair: {row.name} is the best of these drafts at {speed:.2f} times {base} alone, but "
            f"its interval begins at {low:.2f}: none is shown to pay on this machine"
        )
        best_pair = None
    elif best_pair:
        row, speed, low = best_pair
        sure = "" if low is None else f" (at least {low:.2f} by its interval)"
        words.append(
            f"pair: {base} with {row.name} as its draft is {speed:.2f} times as fast as {base} "
            f"alone{sure} and writes exactly what that writes"
        )
    elif whole:
        words.append(
            f"pair: none of these drafts pays for {base} on this machine: run it alone, or take a "
            "bigger target"
        )
    if best_single:
        gain = _alone(best_single)
        quality = best_single.found["quality"]
        same = 100 * quality["same_top"]["value"]
        words.append(
            f"single file: {best_single.name} alone is {gain:.2f} times as fast as {base}; it is "
            f"another model: mean KLD {quality['kld']['value']:.4f}, the same top token in "
            f"{same:.1f} % of places"
        )
        if best_pair and gain > best_pair[1]:
            words.append("the single file is the faster one, the pair the exact one")
    elif whole:
        words.append(
            f"single file: none is both faster than {base} and close to it (mean KLD up to "
            f"{_CLOSE})"
        )
    if not whole:
        words.append("nothing was measured")
    ladder = sorted(rows, key=lambda row: -row.n_bytes)
    recommendation = Recommendation(
        best_pair[0].name if best_pair else None, best_single.name if best_single else None,
        tuple(words),
    )  # fmt: skip
    return Comparison(reference, tuple(ladder), recommendation, complete)


def _best_pair(rows: Sequence[Measured]) -> tuple[Measured, float, float | None] | None:
    """The draft with the highest measured speed-up, if it is one: all temperatures count alike."""
    found: list[tuple[float, float | None, int]] = []
    for i, row in enumerate(rows):
        ratios = [of["measured"] for of in row.found["as_draft"] if of["measured"]]
        if ratios:
            lows = [r["low"] for r in ratios]
            low = None if None in lows else min(lows)
            found.append((sum(r["value"] for r in ratios) / len(ratios), low, i))
    speed, low, i = max(found, key=lambda of: of[0], default=(0.0, None, 0))
    return (rows[i], speed, low) if speed > 1 else None


def _best_single(rows: Sequence[Measured]) -> Measured | None:
    """The fastest file among those that are close to the reference, if it is faster."""
    close = [r for r in rows if r.found["quality"]["kld"]["value"] <= _CLOSE and _alone(r) > 1]
    return max(close, key=_alone, default=None)


def _alone(row: Measured) -> float:
    """Speed of a rung alone over the reference alone."""
    return float(row.found["per_second"] / row.found["target_per_second"])
