"""Check that a text is the target's own: run the target alone over it, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.records import Round
from qdraft.decoding.sampling import Row, Sampler


@dataclass(frozen=True, slots=True)
class Check:
    """The result of running the target alone over a text.

    ``same`` is True if the target alone could have written the text. ``by_token`` says what that
    means. If True, as for greedy texts and those of coupled verification, every token is the one
    that the target alone chooses; if False, every token is in the support of its distribution.

    ``fork`` is the index of the first emitted token that differs, and ``margin`` says by how much
    logits must change there for the emitted token. ``noise`` is the largest difference between
    logits decoded one by one and as the rounds decoded them: at the fork, or in the last round with
    a draft if there is no fork. It is None if no round had a draft. ``repeated`` is True if the row
    at the fork, decoded as its round did, gives the emitted token again.
    """

    same: bool
    by_token: bool
    fork: int | None
    margin: float | None
    noise: float | None
    repeated: bool = False

    @property
    def explained(self) -> bool:
        """False if numerics cannot explain the fork: then the fork is a bug."""
        within_noise = self.noise is not None and (self.margin or 0.0) <= 2 * self.noise
        return self.margin is None or self.repeated or within_noise


def check(
    target: TokenSequence, prompt: Sequence[int], rounds: Sequence[Round], sampler: Sampler
) -> Check:
    """Run the target alone over prompt and emitted tokens, then repeat the rounds.

    This takes as long as the target alone takes for the text, plus the verify batches. ``target``
    is a sequence of its own.
    """
    fork, margin, place = None, None, 0
    witness: tuple[int, list[Row]] | None = None  # a round, and its rows one by one
    target.truncate(0)
    tokens = list(prompt)
    for index, round in enumerate(rounds):
        rows: list[Row] = []
        for token in round.tokens:
            rows.append(target.eval(tokens[target.n_past :], 1)[0].copy())
            margin = _margin(sampler, rows[-1], tokens, token)
            if margin is not None:
                fork = place
                break
            tokens.append(token)
            place += 1
        if round.n_draft or fork is not None:
            witness = (index, rows)
        if fork is not None:
            break
    if witness is None:
        return Check(fork is None, sampler.chooses, fork, margin, None)
    index, alone = witness
    together = _decode_again(target, prompt, rounds[: index + 1])
    n = min(len(alone), len(together))
    first = n - 1 if fork is not None else 0
    noise = float(np.abs(together[first:n] - np.stack(alone[first:n])).max())
    repeated = False
    if fork is not None:
        emitted = rounds[index].tokens[n - 1]
        repeated = _margin(sampler, together[n - 1], tokens, emitted) is None
    return Check(fork is None, sampler.chooses, fork, margin, noise, repeated)


def _decode_again(
    target: TokenSequence, prompt: Sequence[int], rounds: Sequence[Round]
) -> NDArray[np.float32]:
    """Return the rows of the last of ``rounds``, decoded as the rounds did."""
    target.truncate(0)
    tokens = list(prompt)
    for round in rounds:
        target.checkpoint(round.n_draft)
        rows = target.eval([*tokens[target.n_past :], *round.draft.tokens], round.n_draft + 1)
        tokens += round.tokens
        target.truncate(len(tokens) - 1)
    return rows


def _margin(sampler: Sampler, row: Row, context: Sequence[int], token: int) -> float | None:
    """Return how far logits are from ``token``; None if the target alone could have emitted it."""
    if sampler.chooses:
        scores = sampler.scores(row, context)
        if scores.best == token:
            return None
        score = scores.of(token)
        if sampler.gumbel is not None and score is not None and np.isfinite(score):
            best = scores.of(scores.best) or 0.0
            return (best - score) * (sampler.params.temperature or 1.0)
    elif sampler.distribution(row, context).prob(token) > 0:
        return None
    logits = sampler.process(row, context)
    best = sampler.argmax(row, context)
    return abs(float(logits[best] - logits[token]))
