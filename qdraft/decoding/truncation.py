"""The steps of sampling that leave some candidates, and what they need: arrays in, indices out."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Floats = NDArray[np.float64]


def softmax(logits: Floats, temperature: float = 1.0) -> Floats:
    """exp(logits / temperature), normalised; shape [n], float64."""
    out: Floats = np.exp((logits - logits.max()) / temperature)
    out /= out.sum()
    return out


def keep_top_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Indices of the smallest set of likeliest entries whose sum reaches ``limit``, ascending.

    Nucleus sampling, Holtzman et al. 2020 (arXiv:1904.09751), section 3.1.
    """
    # Entries below (1 - limit) / n sum to less than 1 - limit, so the nucleus never
    # needs one: only the others have to be sorted.
    others = np.flatnonzero(probs >= (1 - limit) / len(probs))
    order = others[np.argsort(-probs[others], kind="stable")]
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), limit, "left")) + 1
    return np.sort(order[:n_kept])


def keep_min_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Indices of the entries with at least ``limit`` times the largest probability.

    Min-p sampling, Nguyen et al. 2024 (arXiv:2407.01082), section 3.
    """
    return np.flatnonzero(probs >= limit * probs.max())


def keep_typical_p(probs: Floats, limit: float) -> NDArray[np.intp]:
    """Indices of the entries closest to the entropy whose sum exceeds ``limit``, ascending.

    Locally typical sampling, Meister et al. 2023 (arXiv:2202.00666), equation 10. llama.cpp asks
    for a sum above the limit here, and for one of at least the limit in top-p.
    """
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    entropy = float(np.sum(probs * np.where(probs > 0, surprise, 0.0)))
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(probs[order]), limit, "right")) + 1
    return np.sort(order[:n_kept])


def keep_xtc(probs: Floats, threshold: float) -> NDArray[np.intp]:
    """Indices without the likeliest entries: of those from ``threshold`` on, the last stays.

    "Exclude top choices", by p-e-w (https://github.com/oobabooga/text-generation-webui/pull/6335).
    """
    top = np.flatnonzero(probs >= threshold)
    if len(top) < 2:
        return np.arange(len(probs))
    order = top[np.argsort(-probs[top], kind="stable")]
    return np.delete(np.arange(len(probs)), order[:-1])


def within_sigmas(row: Row, n_sigmas: float) -> Row:
    """The row with -inf for logits below the largest minus ``n_sigmas`` standard deviations.

    Top-n-sigma sampling, Tang et al. 2024 (arXiv:2411.07641). Banned tokens do not count.
    """
    sigma = float(row[np.isfinite(row)].std(dtype=np.float64))
    return np.where(row >= row.max() - n_sigmas * sigma, row, np.float32(-np.inf))


def dynamic_temperature(
    logits: Floats, temperature: float, spread: float, exponent: float
) -> float:
    """The temperature of these candidates: ``spread`` below to ``spread`` above ``temperature``.

    llama.cpp's: the entropy of the candidates, as a share of what as many equal ones have, to the
    power of ``exponent``, says how far up.
    """
    if len(logits) < 2:
        return temperature
    probs = softmax(logits)
    positive = probs[probs > 0]
    share = -float(np.sum(positive * np.log(positive))) / math.log(len(logits))
    low, high = max(0.0, temperature - spread), temperature + spread
    return float(low + (high - low) * max(0.0, share) ** exponent)
