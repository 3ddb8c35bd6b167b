"""Verification: which draft tokens stand, and which token follows them.

Token-level rejection sampling, Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1,
and Chen et al. 2023 (arXiv:2302.01318), algorithm 2: a draft token x is accepted with
probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from the
residual, proportional to max(p - q, 0). The emitted tokens then have exactly the law p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from qdraft.decoding.records import Distribution, Draft, Origin, Verdict
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Floats, Row, Sampler


def verify(
    draft: Draft,
    rows: Row,
    context: Sequence[int],
    sampler: Sampler,
    rng: Rng,
    rule: str = "token",
) -> Verdict:
    """Verify a draft of n tokens against the target's logits, shape [n + 1, n_vocab].

    Row i follows ``context`` and the first i draft tokens. Rows after the first
    rejection are not looked at, except by block verification. Raises LogitsError on a bad row.
    """
    tokens = draft.tokens
    if sampler.greedy:
        return greedy(tokens, lambda i: sampler.argmax(rows[i], context, tokens[:i]))
    judge = block_rejection if rule == "block" else rejection
    return judge(draft, lambda i: sampler.distribution(rows[i], context, tokens[:i]), rng)


def greedy(tokens: Sequence[int], argmax: Callable[[int], int]) -> Verdict:
    """Accept while the draft token is the target's likeliest one."""
    for i, token in enumerate(tokens):
        best = argmax(i)
        if token != best:
            return Verdict((*tokens[:i], best), i + 1, Origin.RESIDUAL)
    n = len(tokens)
    return Verdict((*tokens, argmax(n)), n, Origin.BONUS if n else Origin.TARGET)


def rejection(draft: Draft, target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """Accept each draft token with min(1, p / q); replace the first rejected one."""
    for i, token in enumerate(draft.tokens):
        p = target_probs(i)
        q = draft.probs[i] if draft.probs is not None else point_mass(token)
        if not rng.accept(p.prob(token) / q.prob(token)):
            replacement = draw(residual(p, q), rng)
            return Verdict((*draft.tokens[:i], replacement), i + 1, Origin.RESIDUAL)
    n = draft.n
    bonus = draw(target_probs(n), rng)
    return Verdict((*draft.tokens, bonus), n, Origin.BONUS if n else Origin.TARGET)


def block_rejection(draft: Draft, target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """Accept the longest prefix that the block as a whole allows.

    Block verification, Sun et al. 2024 (arXiv:2403.10444), algorithm 2: with w_0 = 1 and
    w_i = min(1, w_{i-1} p_i / q_i), prefix i stands with probability h_i = s_i / (s_i + 1 - w_i),
    s_i the mass of max(w_i p_{i+1} - q_{i+1}, 0), and h_K = w_K. The token after the longest
    prefix that stands is drawn in proportion to that same max. Same law as ``rejection``, and
    never fewer tokens accepted in expectation.
    """
    tokens = draft.tokens
    n = len(tokens)
    p = [target_probs(i) for i in range(n + 1)]
    q = draft.probs if draft.probs is not None else [point_mass(token) for token in tokens]
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * p[i].prob(token) / q[i].prob(token)))
    stands = n
    while stands > 0:
        w = weights[stands]
        if rng.accept(w if stands == n else prefix_stands(p[stands], q[stands], w)):
            break
        stands -= 1
    if stands == n:
        return Verdict((*tokens, draw(p[n], rng)), n, Origin.BONUS if n else Origin.TARGET)
    replacement = draw(residual(p[stands], q[stands], weights[stands]), rng)
    return Verdict((*tokens[:stands], replacement), stands + 1, Origin.RESIDUAL)


def prefix_stands(p: Distribution, q: Distribution, weight: float) -> float:
    """h_i = s_i / (s_i + 1 - w_i); 1 where both are 0 (p and q are equal from here on)."""
    s = float(_excess(p, q, weight).sum())
    return s / (s + 1 - weight) if s + 1 - weight > 0 else 1.0


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """max(weight p - q, 0), normalised, on the support of p; p itself where it is all zero."""
    rest = _excess(p, q, weight)
    total = rest.sum()
    return Distribution(rest / total, p.ids) if total > 0 else p


def _excess(p: Distribution, q: Distribution, weight: float) -> Floats:
    """max(weight p - q, 0) at the entries of p: tokens are matched by id, not by place."""
    q_probs = q.probs_of(np.arange(len(p.probs)) if p.ids is None else p.ids)
    return np.maximum(weight * p.probs - q_probs, 0.0)


def point_mass(token: int) -> Distribution:
    """All probability on one token."""
    return Distribution(np.ones(1), np.array([token], dtype=np.intp))


def draw(distribution: Distribution, rng: Rng) -> int:
    """One token from a distribution."""
    return distribution.token(rng.draw(distribution.probs))
