"""Rates and costs of rounds: the one definition of each, for runs, benches, replays and tuning.

alpha: the chance that a tested draft token is accepted. draft yield: the share of all draft tokens
that were accepted. tau: tokens emitted per round with a draft. c: time of a draft row, and v(n):
time of a target decode of n rows, both over the time of one target token alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.constraint import FORCED
from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.records import Round


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the draft tokens, over the rounds with a draft."""

    n_rounds: int = 0
    n_drafted: int = 0
    n_tested: int = 0
    n_accepted: int = 0
    n_emitted: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.n_rounds + other.n_rounds,
            self.n_drafted + other.n_drafted,
            self.n_tested + other.n_tested,
            self.n_accepted + other.n_accepted,
            self.n_emitted + other.n_emitted,
        )

    @property
    def alpha(self) -> float | None:
        """n_accepted / n_tested: the tokens after a rejected one say nothing about the draft."""
        return ratio(self.n_accepted, self.n_tested)

    @property
    def draft_yield(self) -> float | None:
        """n_accepted / n_drafted."""
        return ratio(self.n_accepted, self.n_drafted)

    @property
    def tau(self) -> float | None:
        """n_emitted / n_rounds: Leviathan et al. 2023 (arXiv:2211.17192), equation 1, as measured.

        A text that ends on an accepted draft token has no token after it in its last round.
        """
        return ratio(self.n_emitted, self.n_rounds)


def count(rounds: Sequence[Round]) -> Counts:
    """Counts over the rounds with a draft."""
    drafted = [r for r in rounds if r.n_draft]
    return Counts(
        len(drafted),
        sum(r.n_draft for r in drafted),
        sum(r.n_tested for r in drafted),
        sum(r.n_accepted for r in drafted),
        sum(r.n_emitted for r in drafted),
    )


def count_by_source(round: Round) -> Iterator[tuple[str, int, int, int]]:
    """Each source of a round's draft, and its tokens drafted, tested and accepted."""
    forced = set(round.draft.forced)
    others = [i for i in range(round.n_draft) if i not in forced]
    for source, places in ((round.source, others), (FORCED, sorted(forced))):
        if places:
            n_tested, n_accepted = (
                bisect_left(places, n) for n in (round.n_tested, round.n_accepted)
            )
            yield source, len(places), n_tested, n_accepted


def by_place(rounds: Sequence[Round]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many draft tokens were tested, and accepted, at each place of their drafts."""
    n = max((r.n_tested for r in rounds), default=0)
    tested = tuple(sum(r.n_tested > i for r in rounds) for i in range(n))
    return tested, tuple(sum(r.n_accepted > i for r in rounds) for i in range(n))


def alpha_by_place(tested: Sequence[int], accepted: Sequence[int]) -> tuple[float | None, ...]:
    """alpha at each place of a draft, from the counts of ``by_place``."""
    return tuple(ratio(a, t) for a, t in zip(accepted, tested, strict=True))


def sum_min(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """The sum over x of min(p(x), q(x)): the chance that a draw from q is accepted.

    Both have shape [n_vocab]. alpha is its mean over contexts: Leviathan et al. 2023
    (arXiv:2211.17192), corollary 3.6.
    """
    return float(np.minimum(p, q).sum())


def target_seconds(rounds: Sequence[Round]) -> float | None:
    """Seconds of one target token alone: the median of the rounds that decoded one row.

    The time of a drafter that offered no token is not part of them.
    """
    times = [r.times.target_s for r in rounds if r.n_rows == 1]
    return median(times) if times else None


def draft_row_seconds(round: Round, n_read_free: int = CONSTANTS.n_read_free) -> float | None:
    """Seconds of a draft row of a round.

    None if the round paid for no row, or if the drafter first had to read more than
    ``n_read_free`` tokens of the text.
    """
    draft = round.draft
    if not draft.n_rows or draft.n_caught_up > n_read_free:
        return None
    return round.times.draft_s / draft.n_rows


def draft_cost(rounds: Sequence[Round], target_s: float | None) -> float | None:
    """c: the median draft row over ``target_s``; None if nothing was measured."""
    rows = [row_s for r in rounds if (row_s := draft_row_seconds(r)) is not None]
    return median(rows) / target_s if target_s and rows else None


def verify_costs(rounds: Sequence[Round], target_s: float | None) -> dict[int, float]:
    """v by number of rows: the median of each width above 1 over ``target_s``."""
    if not target_s:
        return {}
    times = target_times([r for r in rounds if r.n_rows > 1])
    return {n: median(of_width) / target_s for n, of_width in sorted(times.items())}


def target_times(rounds: Sequence[Round]) -> dict[int, list[float]]:
    """Seconds of the target's part of each round, by number of rows."""
    times: dict[int, list[float]] = {}
    for r in rounds:
        times.setdefault(r.n_rows, []).append(r.times.target_s)
    return times


def ratio(part: float, whole: float) -> float | None:
    """part / whole; None if there is nothing to divide by."""
    return part / whole if whole else None
