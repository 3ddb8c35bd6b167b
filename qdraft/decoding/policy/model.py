"""What a draft length costs and brings.

k is the number of tokens drafted in a round: ``n_draft`` in code, gamma in Leviathan et al. 2023
(arXiv:2211.17192), K in Chen et al. 2023 (arXiv:2302.01318). alpha is the chance that a tested
draft token is accepted. c is the time of a draft row and v(n) that of a target decode of n rows,
both over the time of one target token alone.

The formulas are equation 1 and theorem 3.8 of Leviathan et al. Theorem 3.8 takes v as 1; here it
is measured, because k + 1 rows cost more than one on most machines.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs: c by source, v by number of rows, and the seconds of one target token.

    ``restart`` is what the first draft after a pause costs beyond its rows, by source, in target
    tokens.
    """

    c: Mapping[str, float]
    v: Mapping[int, float]
    target_s: float | None = None
    restart: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_model(self) -> float:
        """c of the draft model."""
        return self.c["model"]

    def v_at(self, n: float) -> float:
        """v between and beyond the widths that were measured (``interpolate_v``)."""
        return interpolate_v(self.v, n)


def interpolate_v(v: Mapping[int, float], n: float, *, slope_beyond: float = 1.0) -> float:
    """v(n) for ``n`` rows, 1 or more, from measured widths; v(1) is 1.

    Between two widths v is on the line through them, or level if that line falls. Beyond the widest
    one v goes on with ``slope_beyond`` times the slope of the last step. If no width above 1 is
    known, n rows cost n.
    """
    known = {1: 1.0, **v}
    widths = sorted(known)
    if len(widths) == 1:
        return known[1] + (n - 1)
    above = min(max(1, bisect_right(widths, n)), len(widths) - 1)
    low, high = widths[above - 1], widths[above]
    slope = max(0.0, (known[high] - known[low]) / (high - low))
    if n >= high:
        return known[high] + (n - high) * slope * slope_beyond
    return known[low] + (n - low) * slope


def expected_tokens(alpha: float, n_draft: int) -> float:
    """Expected tokens of a round, tau = (1 - alpha^(k+1)) / (1 - alpha): equation 1.

    Summed term by term, so that alpha = 1 is not a special case.
    """
    return float(sum(alpha**i for i in range(n_draft + 1)))


def speedup(alpha: float, n_draft: int, c: float, v: float) -> float:
    """Expected speed over the target alone, tau / (k c + v): theorem 3.8 with measured v.

    ``v`` is the cost of the verify batch of k + 1 rows.
    """
    return expected_tokens(alpha, n_draft) / (n_draft * c + v)


def best_n_draft(alpha: float, c: float, v: Mapping[int, float]) -> tuple[int, float]:
    """The draft length with the highest expected speed-up, and that speed-up.

    (0, 1) if no length pays off.

    ``v`` is the cost of a decode by its number of rows: those lengths are tried.
    """
    speedups = {width - 1: speedup(alpha, width - 1, c, cost) for width, cost in v.items()}
    n_draft = max(speedups, key=lambda k: speedups[k])
    return (n_draft, speedups[n_draft]) if speedups[n_draft] > 1 else (0, 1.0)


def break_even_alpha(n_draft: int, c: float, v: float) -> float | None:
    """The smallest alpha at which k tokens a round pay off; None if no alpha is enough.

    The root of tau(alpha) = k c + v by bisection: tau grows with alpha.
    """
    if speedup(1.0, n_draft, c, v) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, n_draft, c, v) >= 1 else (middle, high)
    return high
