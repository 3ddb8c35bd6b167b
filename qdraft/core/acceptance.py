"""Verification: which draft tokens stand, and which token follows them.

Token-level rejection sampling, Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1,
and Chen et al. 2023 (arXiv:2302.01318), algorithm 2: a draft token x is accepted with
probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from the
residual, proportional to max(p - q, 0). The emitted tokens then have exactly the law p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qdraft.core.rng import Rng
from qdraft.core.sampling import Row, Sampler
from qdraft.types import Distribution, Draft, Origin, Verdict


def verify(draft: Draft, rows: Row, context: Sequence[int], sampler: Sampler, rng: Rng) -> Verdict:
    """Verify a draft of n tokens against the target's logits, shape [n + 1, n_vocab].

    Row i follows ``context`` and the first i draft tokens. Rows after the first
    rejection are not looked at. Raises LogitsError on a bad row.
    """
    tokens = draft.tokens
    if sampler.greedy:
        return greedy(tokens, lambda i: sampler.argmax(rows[i], context, tokens[:i]))
    return rejection(draft, lambda i: sampler.distribution(rows[i], context, tokens[:i]), rng)


def greedy(tokens: Sequence[int], argmax: Callable[[int], int]) -> Verdict:
    """Accept while the draft token is the target's likeliest one."""
    for i, token in enumerate(tokens):
        best = argmax(i)
        if token != best:
            return Verdict(i, i + 1, best, Origin.RESIDUAL)
    n = len(tokens)
    return Verdict(n, n, argmax(n), Origin.BONUS if n else Origin.TARGET)


def rejection(draft: Draft, target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """Accept each draft token with min(1, p / q); replace the first rejected one."""
    for i, token in enumerate(draft.tokens):
        p = target_probs(i)
        q = draft.probs[i] if draft.probs is not None else point_mass(token)
        if not rng.accept(p.prob(token) / q.prob(token)):
            return Verdict(i, i + 1, draw(residual(p, q), rng), Origin.RESIDUAL)
    n = len(draft.tokens)
    return Verdict(n, n, draw(target_probs(n), rng), Origin.BONUS if n else Origin.TARGET)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), normalised, on the support of p; p itself where that is all zero."""
    q_probs = q.probs_of(np.arange(len(p.probs)) if p.ids is None else p.ids)
    rest = np.maximum(p.probs - q_probs, 0.0)
    total = rest.sum()
    return Distribution(rest / total, p.ids) if total > 0 else p


def point_mass(token: int) -> Distribution:
    """All probability on one token."""
    return Distribution(np.ones(1), np.array([token], dtype=np.intp))


def draw(distribution: Distribution, rng: Rng) -> int:
    """One token from a distribution."""
    return distribution.token(rng.draw(distribution.probs))
