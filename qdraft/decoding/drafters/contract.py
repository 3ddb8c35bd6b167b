"""The contract of a drafter: what a draft must be, so that the text keeps the target's law."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.policy.gate import Gate
from qdraft.decoding.records import MAX_N_DRAFT, Distribution, Draft
from qdraft.errors import DrafterError

# How far the sum of q may be from 1: what adding up a large vocabulary in float32 can cost.
_TOLERANCE = 1e-4


class CountedGate:
    """A gate that counts what it admits, ``n_most`` tokens; a drafter must not offer more."""

    def __init__(self, gate: Gate, n_most: int) -> None:
        self._gate = gate
        self._n_most = n_most
        self.n_admitted = 0

    @property
    def weighs_confidence(self) -> bool:
        return self._gate.weighs_confidence

    def more(self, source: str, n_behind: int = 0) -> bool:
        return self.n_admitted < self._n_most and self._gate.more(source, n_behind)

    def take(self, source: str, confidence: float) -> bool:
        admitted = self.n_admitted < self._n_most and self._gate.take(source, confidence)
        self.n_admitted += admitted
        return admitted

    def extend(self, n: int) -> int:
        n_admitted = self._gate.extend(min(n, self._n_most - self.n_admitted))
        self.n_admitted += n_admitted
        return n_admitted


def check_draft(draft: Draft, n_admitted: int, n_vocab: int) -> None:
    """Raise DrafterError unless verification can judge ``draft``.

    It may have ``n_admitted`` tokens of ``n_vocab``, and each must have been possible under its q.
    """
    problem = _problem_of_tokens(draft, n_admitted, n_vocab) or _problem_of_measures(draft, n_vocab)
    if problem:
        raise DrafterError(
            f"the drafter {draft.source!r} {problem}",
            hint="mend the drafter: qdraft.decoding.drafters.protocol says what it must do",
        )


def _problem_of_tokens(draft: Draft, n_admitted: int, n_vocab: int) -> str:
    """What is wrong with the tokens; empty if nothing is."""
    if draft.n > MAX_N_DRAFT:
        return f"offers {draft.n} tokens, but a draft has {MAX_N_DRAFT} at most"
    if draft.n > n_admitted:
        return f"offers {draft.n} tokens, but its gate admitted {n_admitted}"
    for token in draft.tokens:
        if not isinstance(token, (int, np.integer)) or not 0 <= token < n_vocab:
            return f"offers token {token}, but the vocabulary has {n_vocab} tokens"
    return ""


def _problem_of_measures(draft: Draft, n_vocab: int) -> str:
    """What is wrong with the distributions and the confidences; empty if nothing is."""
    if draft.confidence and len(draft.confidence) != draft.n:
        return f"offers {draft.n} tokens with {len(draft.confidence)} confidences"
    for confidence in draft.confidence:
        if not 0 <= confidence <= 1 + _TOLERANCE:
            return f"has the confidence {confidence}, which is not from 0 to 1"
    if draft.probs is None:
        return ""
    if len(draft.probs) != draft.n:
        return f"offers {draft.n} tokens with {len(draft.probs)} distributions"
    for i, (token, q) in enumerate(zip(draft.tokens, draft.probs, strict=True)):
        if problem := _problem_of_q(q, token, n_vocab):
            return f"has a q for token {i + 1} of its draft that {problem}"
    return ""


def _problem_of_q(q: Distribution, token: int, n_vocab: int) -> str:
    """What is wrong with the distribution that ``token`` was drawn from; empty if nothing is."""
    probs = np.asarray(q.probs)
    if probs.ndim != 1 or not probs.size:
        return f"has the shape {probs.shape}, not [n]"
    if q.ids is None and probs.size > n_vocab:
        return f"covers {probs.size} tokens, but the vocabulary has {n_vocab}"
    if q.ids is not None and not _are_tokens(np.asarray(q.ids), probs.shape, n_vocab):
        return f"does not have {probs.size} ascending ids of a vocabulary of {n_vocab} tokens"
    total = float(probs.sum(dtype=np.float64))
    if not math.isfinite(total):
        return "is not finite"
    if probs.min() < 0:
        return "is negative for some token"
    if abs(total - 1) > _TOLERANCE:
        return f"sums to {total:.6g}, not to 1"
    return "" if q.prob(token) > 0 else f"gives token {token}, which was drawn, no probability"


def _are_tokens(ids: NDArray[Any], shape: tuple[int, ...], n_vocab: int) -> bool:
    """True for ascending token ids in an array of this shape; look-ups search among them."""
    is_known = ids.shape == shape and ids.dtype.kind in "iu" and ids[0] >= 0 and ids[-1] < n_vocab
    return bool(is_known and (ids[1:] > ids[:-1]).all())
