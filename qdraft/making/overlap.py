"""How well a draft stands in for its target: the same top token, and sum min(p, q)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.intervals import Mean, mean_of
from qdraft.decoding.rates import sum_min
from qdraft.llama.progress import Progress, no_progress


@dataclass(frozen=True, slots=True)
class Overlap:
    """Means over ``n`` positions of texts, at temperature 1 and untruncated.

    ``same_top`` is the share of positions at which both models have the same top token: alpha of
    greedy drafting. ``sum_min`` is the mean of sum over x of min(p(x), q(x)): alpha of sampled
    drafting (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6). ``sum_min_error`` is its
    standard error. All are of the first token of a draft. ``by_temperature`` has the acceptance
    rate at each temperature asked for: ``same_top`` at 0, else the mean of sum min(p, q) there.
    """

    n: int
    same_top: float
    sum_min: float
    sum_min_error: float
    by_temperature: dict[float, Mean] = field(default_factory=dict)


def measure_overlap(
    target: TokenSequence,
    draft: TokenSequence,
    texts: Sequence[tuple[int, Sequence[int]]],
    copy: Callable[[int], None] | None = None,
    progress: Progress = no_progress,
    temperatures: Sequence[float] = (),
) -> Overlap:
    """Compare both models over ``texts``: the number of prompt tokens and all tokens of each.

    ``copy`` copies the target's KV cells into the draft from a position on; with it the draft sees
    them before each position, else it keeps its own. Both sequences end empty.
    """
    same: list[bool] = []
    shares: dict[float, list[float]] = {t: [] for t in (1.0, *temperatures) if t > 0}
    n_positions = sum(len(tokens) - n_prompt for n_prompt, tokens in texts)
    n_vocab = min(target.vocab.n_tokens, draft.vocab.n_tokens)
    for n_prompt, tokens in texts:
        target.truncate(0)
        draft.truncate(0)
        target.eval(tokens[: n_prompt - 1], 0)
        if copy is None:
            draft.eval(tokens[: n_prompt - 1], 0)
        n_copied = 0
        for position in range(n_prompt - 1, len(tokens) - 1):
            if copy is not None:
                copy(n_copied)
                n_copied = position
            token = tokens[position : position + 1]
            p = target.eval(token, 1)[0, :n_vocab]
            q = draft.eval(token, 1)[0, :n_vocab]
            same.append(bool(p.argmax() == q.argmax()))
            for t, of_temperature in shares.items():
                of_temperature.append(sum_min(_softmax(p, t), _softmax(q, t)))
            progress("comparing draft and target", len(same), n_positions)
    target.truncate(0)
    draft.truncate(0)
    means = {0.0: mean_of(same), **{t: mean_of(shares_at) for t, shares_at in shares.items()}}
    return Overlap(
        n=len(same),
        same_top=means[0].value,
        sum_min=means[1].value,
        sum_min_error=means[1].error,
        by_temperature={t: means[t] for t in temperatures},
    )


def _softmax(row: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    return np.asarray(weights / weights.sum())
