"""From a row of logits to the distribution that the next token is drawn from.

The steps and their order are those of llama.cpp's default sampler chain: logit
bias, penalties, top-k, typical-p, top-p, min-p, temperature. Target and draft go
through one Sampler, so that q and p are always made the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.records import Distribution, SamplingParams
from qdraft.errors import LogitsError, UsageError

Row = NDArray[np.float32]
Floats = NDArray[np.float64]


class Sampler:
    """Turns logits into a token (greedy) or a Distribution, for one request.

    ``context`` is the text so far and ``drafted`` the draft tokens after it that
    precede this row: the penalties of row i see both, so a draft changes nothing.
    """

    def __init__(self, params: SamplingParams, n_vocab: int) -> None:
        self.params = params
        unknown = [token for token in params.logit_bias if token >= n_vocab]
        if unknown:
            raise UsageError(
                f"logit bias for token {unknown[0]}, but the vocabulary has {n_vocab} tokens"
            )
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.intp)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._penalises = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    def argmax(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> int:
        """The likeliest token after bias and penalties; builds no probabilities.

        Raises LogitsError when the row holds NaN or nothing finite.
        """
        row = self.adjust(row, context, drafted)
        token = int(row.argmax())
        _check_finite(row[token])
        return token

    def distribution(
        self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()
    ) -> Distribution:
        """The distribution of the next token for one row of logits, shape [n_vocab].

        Raises LogitsError when the row holds NaN or nothing finite.
        """
        params = self.params
        row = self.adjust(row, context, drafted)
        _check_finite(row.max())
        ids: NDArray[np.intp] | None = None
        if 0 < params.top_k < len(row):
            ids = np.sort(np.argpartition(row, -params.top_k)[-params.top_k :])
            row = row[ids]
        logits = row.astype(np.float64)
        for limit, off, keep in (
            (params.typical_p, 1, keep_typical_p),
            (params.top_p, 1, keep_top_p),
            (params.min_p, 0, keep_min_p),
        ):
            if limit != off:
                kept = keep(softmax(logits), limit)
                logits, ids = logits[kept], kept if ids is None else ids[kept]
        return Distribution(softmax(logits, self.params.temperature or 1.0), ids)

    def confidence(self, row: Row) -> float:
        """The largest softmax probability of a raw row, in (0, 1]."""
        top = row.max()
        return 1.0 / float(np.exp(row - top).sum(dtype=np.float64))

    def adjust(self, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> Row:
        """Bias and penalties, on a copy: rows are borrowed from the engine."""
        if not (len(self._bias_ids) or self._penalises):
            return row
        row = row.copy()
        row[self._bias_ids] += self._bias
        if self._penalises:
            self._penalise(row, recent(context, drafted, self.params.repeat_last_n))
        return row

    def _penalise(self, row: Row, history: Sequence[int]) -> None:
        """llama.cpp's penalties: divide (or multiply) by repeat, subtract the other two."""
        params = self.params
        ids, counts = np.unique(np.asarray(history, dtype=np.intp), return_counts=True)
        logits = row[ids]
        logits = np.where(
            logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty
        )
        row[ids] = logits - counts * params.frequency_penalty - params.presence_penalty


def recent(context: Sequence[int], drafted: Sequence[int], n: int) -> list[int]:
    """The last ``n`` tokens of context and draft together (-1: all)."""
    if n < 0:
        return [*context, *drafted]
    n_context = max(0, n - len(drafted))
    return [*context[max(0, len(context) - n_context) :], *drafted[max(0, len(drafted) - n) :]]


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """exp(logits / temperature), normalised; shape [n], float64."""
    out: Floats = np.exp((logits - logits.max()) / temperature)
    out /= out.sum()
    return out


def keep_top_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Places of the smallest set of likeliest entries whose sum reaches ``limit``, ascending.

    Nucleus sampling, Holtzman et al. 2020 (arXiv:1904.09751), section 3.1.
    """
    # Entries below (1 - limit) / n sum to less than 1 - limit, so the nucleus never
    # needs one: only the others have to be sorted.
    places = np.flatnonzero(probs >= (1 - limit) / len(probs))
    order = places[np.argsort(-probs[places], kind="stable")]
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), limit, "left")) + 1
    return np.sort(order[:n_kept])


def keep_min_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Places of the entries with at least ``limit`` times the largest probability.

    Min-p sampling, Nguyen et al. 2024 (arXiv:2407.01082), section 3.
    """
    return np.flatnonzero(probs >= limit * probs.max())


def keep_typical_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Places of the entries closest to the entropy whose sum reaches ``limit``, ascending.

    Locally typical sampling, Meister et al. 2023 (arXiv:2202.00666), equation 10.
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float(np.sum(probs * np.where(probs > 0, surprise, 0.0)))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), limit, "left")) + 1
    return np.sort(order[:n_kept])


def _check_finite(top: np.floating) -> None:
    # NaN wins both max and argmax in numpy, so the largest value tells about the whole row.
    if not np.isfinite(top):
        raise LogitsError(f"the largest logit of a row is {top}, not a finite number")
