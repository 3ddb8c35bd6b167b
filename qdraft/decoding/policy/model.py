"""What a draft length costs and brings.

alpha: chance that a tested draft token is accepted. c: time of one draft token over
time of one target token. v: time of a target decode of n tokens over time of one.
Formulas: Leviathan et al. 2023 (arXiv:2211.17192), equation 1 and theorem 3.8, with the
verify cost v(n) measured instead of taken as 1.
"""

from __future__ import annotations

from collections.abc import Mapping


def expected_tokens(alpha: float, n_draft: int) -> float:
    """Expected tokens emitted in a round, tau = (1 - alpha^(k+1)) / (1 - alpha)."""
    return float(sum(alpha**i for i in range(n_draft + 1)))


def speedup(alpha: float, n_draft: int, c: float, v: float) -> float:
    """Expected speed over the target alone: tau / (k c + v), v the cost of k + 1 rows."""
    return expected_tokens(alpha, n_draft) / (n_draft * c + v)


def best_n_draft(alpha: float, c: float, v: Mapping[int, float]) -> tuple[int, float]:
    """The draft length with the highest expected speed-up, and that; (0, 1) where none pays.

    ``v`` is the cost of a decode by its number of rows: those lengths are tried.
    """
    found = {n - 1: speedup(alpha, n - 1, c, cost) for n, cost in v.items()}
    n_draft = max(found, key=lambda k: found[k])
    return (n_draft, found[n_draft]) if found[n_draft] > 1 else (0, 1.0)


def break_even_alpha(n_draft: int, c: float, v: float) -> float | None:
    """The smallest alpha at which n_draft tokens a round pay; None if none does."""
    if speedup(1.0, n_draft, c, v) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, n_draft, c, v) >= 1 else (middle, high)
    return high
