"""Verification: which draft tokens stand, and which token follows them.

Notation, for a draft X_1 .. X_k after a context c:

    p(x | X^i)  the target's distribution after c and X_1 .. X_i: ``target_probs(i)``
    q(x | X^i)  the draft's, from which X_(i+1) was drawn: ``draft.probs[i]``

These are p_(i+1) and q_(i+1) in Leviathan et al., M_b and M_s in Sun et al.; k is gamma there and
K in Chen et al. Whatever q is, the emitted tokens have exactly the law p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from qdraft.decoding.records import Distribution, Draft, Origin, Verdict
from qdraft.decoding.rng import Rng
from qdraft.decoding.sampling import Floats, Row, Sampler, draw, point_mass
from qdraft.errors import LogitsError

Result = TypeVar("Result")


def verify(
    draft: Draft,
    rows: Row,
    context: Sequence[int],
    sampler: Sampler,
    rng: Rng,
    rule: str,
) -> Verdict:
    """Verify a draft of k tokens against the target's logits, shape [k + 1, n_vocab].

    Row i follows ``context`` and the first i draft tokens. ``rule`` is "token" or "block". A
    sampler that chooses, which is greedy or has Gumbel noise ("coupled"), needs neither. Only rows
    that can still matter become probabilities. The draft ends before a bad row: the tokens before
    it are judged as a draft of their own, so that no text fails for a row that the target alone
    would not have read. Raises LogitsError if row 0 is bad.
    """
    tokens = draft.tokens
    sampler.prepare(context, tokens)
    if sampler.chooses:
        return matching(tokens, lambda i: sampler.choose(rows[i], context, tokens[:i]))
    judge = block_rejection if rule == "block" else rejection
    return judge(draft, lambda i: sampler.distribution(rows[i], context, tokens[:i]), rng)


def matching(tokens: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Accept while the draft token is the one that the target chooses.

    The emitted tokens are the target's choices, so the draft decides only how many there are.
    """
    for i, token in enumerate(tokens):
        chosen = _unless_bad(choose, i)
        if chosen is None:
            return _accepted(tokens[:i])
        if token != chosen:
            return _rejected(tokens, i, chosen)
    return _accepted(tokens, _unless_bad(choose, len(tokens)))


def rejection(draft: Draft, target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """Judge the draft token by token.

    Leviathan et al. 2023 (arXiv:2211.17192), algorithm 1; Chen et al. 2023 (arXiv:2302.01318),
    algorithm 2. X_(i+1) stands with probability min(1, p(X_(i+1) | X^i) / q(X_(i+1) | X^i)). The
    first that does not is replaced by a draw from the residual, norm(max(p - q, 0)). If all
    stand, one more token is drawn from p(. | X^k).
    """
    for i, token in enumerate(draft.tokens):
        p, q = _unless_bad(target_probs, i), _draft_probs(draft, i)
        if p is None:
            return _accepted(draft.tokens[:i])
        if not rng.accept(min(1.0, p.prob(token) / q.prob(token))):
            return _rejected(draft.tokens, i, draw(residual(p, q), rng))
    return _bonus(draft.tokens, target_probs, rng)


def block_rejection(draft: Draft, target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """Judge the draft as a block: accept the longest prefix that stands.

    Sun et al. 2024, "Block Verification Accelerates Speculative Decoding" (arXiv:2403.10444),
    algorithm 2. The weight of a prefix X^i (p_i in the paper, w_i here) is the token rule's
    ratio, carried from token to token and capped at 1 at each:

        w_0 = 1,  w_i = min(1, w_(i-1) p(X_i | X^(i-1)) / q(X_i | X^(i-1)))

    A token that the target likes more than the draft makes up for earlier ones that it likes
    less, where the token rule wastes that surplus. Each prefix X^i is tested on its own, with a
    random number of its own, and stands with probability

        s_i = sum over x of max(w_i p(x | X^i) - q(x | X^i), 0)
        h_i = s_i / (s_i + 1 - w_i) for i < k, and h_k = w_k

    With tau the longest prefix that stands (0 always does), the next token is drawn from
    p(. | X^k) if tau = k, else from the residual norm(max(w_tau p(. | X^tau) - q(. | X^tau), 0)).

    The paper tests i = 1 .. k and keeps the last i that stands. The tests are independent of one
    another, so testing from k down and stopping at the first that stands gives the same tau.

    For k = 1 this is the token rule. The law is the same, and the paper proves that it accepts at
    least as many tokens in expectation as any rule that keeps the law.
    """
    tokens, k = draft.tokens, draft.n
    p: list[Distribution] = []
    w = [1.0]
    for i, token in enumerate(tokens):
        if w[i] == 0:  # no longer prefix can stand: its rows do not matter
            break
        row = _unless_bad(target_probs, i)
        if row is None:  # known from X^i alone, so a block of i tokens keeps the law
            tokens, k = tokens[:i], i
            break
        p.append(row)
        w.append(min(1.0, w[i] * row.prob(token) / _draft_probs(draft, i).prob(token)))
    w += [0.0] * (k + 1 - len(w))

    def h(i: int) -> float:
        if w[i] == 0 or i == k:
            return w[i]
        return prefix_stands(p[i], _draft_probs(draft, i), w[i])

    tau = next((i for i in range(k, 0, -1) if rng.accept(h(i))), 0)
    if tau == k:
        return _bonus(tokens, target_probs, rng)
    return _rejected(tokens, tau, draw(residual(p[tau], _draft_probs(draft, tau), w[tau]), rng))


def prefix_stands(p: Distribution, q: Distribution, weight: float) -> float:
    """h_i = s_i / (s_i + 1 - w_i); 1 if that is 0 / 0 (p and q are equal from here on)."""
    s = float(_excess(p, q, weight).sum())
    return s / (s + 1 - weight) if s + 1 - weight > 0 else 1.0


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """norm(max(weight p - q, 0)), on the support of p; p itself if that is zero everywhere."""
    rest = _excess(p, q, weight)
    total = rest.sum()
    return Distribution(rest / total, p.ids) if total > 0 else p


def _excess(p: Distribution, q: Distribution, weight: float) -> Floats:
    """max(weight p - q, 0) at the entries of p; q is looked up by token id, not by index."""
    q_probs = q.probs_of(np.arange(len(p.probs)) if p.ids is None else p.ids)
    return np.maximum(weight * p.probs - q_probs, 0.0)


def _draft_probs(draft: Draft, i: int) -> Distribution:
    """q(. | X^i); a token that was not drawn is a point mass."""
    return draft.probs[i] if draft.probs is not None else point_mass(draft.tokens[i])


def _unless_bad(row: Callable[[int], Result], i: int) -> Result | None:
    """Row i; None if it is bad, unless it is row 0, which every text needs."""
    try:
        return row(i)
    except LogitsError:
        if i == 0:
            raise
        return None


def _bonus(tokens: Sequence[int], target_probs: Callable[[int], Distribution], rng: Rng) -> Verdict:
    """All of ``tokens`` stand, and a draw from the target follows them."""
    p = _unless_bad(target_probs, len(tokens))
    return _accepted(tokens, None if p is None else draw(p, rng))


def _accepted(tokens: Sequence[int], bonus: int | None = None) -> Verdict:
    """All of ``tokens`` stand, and ``bonus`` follows them.

    None if the row for it is bad. Then the last token that stands counts as the one that follows:
    the text may end with it, and otherwise the next round needs that row.
    """
    n = len(tokens)
    if bonus is None:
        return Verdict(tuple(tokens), n, Origin.DRAFT)
    return Verdict((*tokens, bonus), n, Origin.BONUS if n else Origin.TARGET)


def _rejected(tokens: Sequence[int], n_accepted: int, replacement: int) -> Verdict:
    """The draft stands up to the token that ``replacement`` takes the place of."""
    return Verdict((*tokens[:n_accepted], replacement), n_accepted + 1, Origin.RESIDUAL)
