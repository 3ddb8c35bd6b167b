"""Perplexity, and how a quantization changes the distribution, position by position.

The figures have the names of llama.cpp's perplexity tool and are computed in the same way: the text
is cut into chunks of the context's size, each begins with the token that begins a text, and the
second half of each chunk is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.intervals import Mean, mean_of
from qdraft.errors import LogitsError, UsageError
from qdraft.llama.progress import Progress, no_progress
from qdraft.study.logit_store import DEPTH, Rows, log_softmax

Floats = NDArray[np.float64]

_BLOCK = 1 << 23  # logits of one block: 32 MiB in float32
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean of -ln p(next token) over ``n`` positions, with its standard error."""

    n: int
    ppl: Mean


@dataclass(frozen=True, slots=True)
class Divergence:
    """A quantization Q against a base, over the same positions; errors are standard errors.

    ``kld`` is the mean of sum over x of p_base ln(p_base / p_Q), ``dp`` that of p_Q - p_base of the
    token that follows in the text, ``rms_dp`` the root of the mean of its square, ``same_top``
    the share of positions at which both have the same likeliest token. ``ln_ratio`` is the mean of
    ln(PPL(Q) / PPL(base)), ``correlation`` the correlation of ln PPL over the positions.
    """

    n: int
    ppl: Mean
    ppl_base: Mean
    ppl_ratio: Mean
    ln_ratio: Mean
    correlation: float
    kld: Mean
    kld_median: float
    kld_99: float
    kld_max: float
    dp: Mean
    rms_dp: Mean
    same_top: Mean


def chunks_of(tokens: Sequence[int], n_ctx: int, n_most: int | None, bos: int) -> list[list[int]]:
    """Cut a text into chunks of ``n_ctx`` tokens, without what is left over.

    ``bos`` replaces the first token of each chunk; -1 for a model without one. ``n_most`` None
    returns all chunks. Raises UsageError if the text is shorter than one chunk.
    """
    whole = [list(tokens[i : i + n_ctx]) for i in range(0, len(tokens) - n_ctx + 1, n_ctx)]
    if not whole:
        raise UsageError(
            f"the text has {len(tokens)} tokens, but a chunk needs {n_ctx}",
            hint="give a longer text with --file, or a smaller chunk with --ctx-size",
        )
    return [[bos, *chunk[1:]] if bos >= 0 else chunk for chunk in whole[:n_most]]


def rows_at_once(n_vocab: int) -> int:
    """Rows of a block: the number that a context has to return at once."""
    return max(1, min(_MOST_ROWS, _BLOCK // n_vocab))


def n_scored(n_tokens: int) -> int:
    """Return how many positions of a chunk are scored: those of its second half."""
    return n_tokens - 1 - n_tokens // 2


def score_chunk(sequence: TokenSequence, chunk: Sequence[int]) -> Iterator[tuple[list[int], Rows]]:
    """The scored positions of a chunk in blocks: the tokens that follow, and rows of logits.

    The rows are borrowed until the next block. Raises LogitsError for a row that is not finite.
    The sequence ends empty.
    """
    first = len(chunk) // 2
    last = len(chunk) - 1  # nothing follows the last token
    size = rows_at_once(sequence.vocab.n_tokens)
    sequence.truncate(0)
    sequence.eval(chunk[:first], 0)
    for start in range(first, last, size):
        stop = min(start + size, last)
        rows = sequence.eval(chunk[start:stop], stop - start)
        if not np.isfinite(rows.max(axis=1)).all():
            raise LogitsError(f"a row of logits is not finite, {start} tokens into a chunk")
        yield list(chunk[start + 1 : stop + 1]), rows
    sequence.truncate(0)


class Scores:
    """The scores of positions, added block by block."""

    def __init__(self) -> None:
        self._nll: list[Floats] = []
        self._nll_base: list[Floats] = []
        self._kld: list[Floats] = []
        self._dp: list[Floats] = []
        self._same: list[NDArray[np.bool_]] = []

    def add(self, following: Sequence[int], logits: Rows, base: Rows | None = None) -> None:
        """Add a block of positions: the tokens that follow, logits, the base's log-probabilities.

        ``base`` None scores only the perplexity.
        """
        own = log_softmax(logits)
        positions = np.arange(len(following))
        chosen = own[positions, following].astype(float)
        self._nll.append(-chosen)
        if base is None:
            return
        of_base = base[positions, following].astype(float)
        self._nll_base.append(-of_base)
        self._dp.append(np.exp(chosen) - np.exp(of_base))
        self._same.append(own.argmax(axis=1) == base.argmax(axis=1))
        # What the store cut off counts as zero, as in llama.cpp.
        weights = np.where(base > -DEPTH, np.exp(base), 0.0)
        self._kld.append((weights * (base - own)).sum(axis=1, dtype=float))

    def perplexity(self) -> Perplexity:
        """The perplexity over all positions that were added."""
        nll = np.concatenate(self._nll)
        return Perplexity(len(nll), _exp(mean_of(nll)))

    def divergence(self) -> Divergence:
        """The divergence from the base over all positions that were added with it."""
        nll, base = np.concatenate(self._nll), np.concatenate(self._nll_base)
        kld, dp = np.concatenate(self._kld), np.concatenate(self._dp)
        ln_ratio = mean_of(nll - base)
        square = mean_of(dp**2)
        rms = float(np.sqrt(square.value))
        spread = float(nll.std() * base.std())
        return Divergence(
            n=len(nll),
            ppl=_exp(mean_of(nll)),
            ppl_base=_exp(mean_of(base)),
            ppl_ratio=_exp(ln_ratio),
            ln_ratio=ln_ratio,
            correlation=float(np.cov(nll, base, bias=True)[0, 1] / spread) if spread else 1.0,
            kld=mean_of(kld),
            kld_median=float(np.median(kld)),
            kld_99=float(np.quantile(kld, 0.99)),
            kld_max=float(kld.max()),
            dp=mean_of(dp),
            rms_dp=Mean(rms, square.error / (2 * rms) if rms else 0.0),
            same_top=mean_of(np.concatenate(self._same)),
        )


def _exp(mean: Mean) -> Mean:
    value = float(np.exp(mean.value))
    return Mean(value, value * mean.error)


def evaluate(
    sequence: TokenSequence,
    chunks: Sequence[Sequence[int]],
    *,
    base: Iterator[Rows] | None = None,
    keep: Callable[[Rows], None] | None = None,
    progress: Progress = no_progress,
) -> Scores:
    """Score all ``chunks``: alone, or against a base.

    ``base`` gives the base's log-probabilities block by block, over the same chunks and the same
    vocabulary. ``keep`` gets the rows of logits of each block. The sequence ends empty.
    """
    scores = Scores()
    for i, chunk in enumerate(chunks):
        for following, rows in score_chunk(sequence, chunk):
            scores.add(following, rows, None if base is None else next(base))
            if keep:
                keep(rows)
        progress("scoring", i + 1, len(chunks))
    return scores
