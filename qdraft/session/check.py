"""Check that a text is the target's own: run the target alone over it, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.records import Round
from qdraft.decoding.sampling import Row, Sampler


@dataclass(frozen=True, slots=True)
class Check:
    """The result of running the target alone over a text.

    ``same`` is True if the target alone could have written the text: if greedy, every token is the
    one that it chooses; if sampled, every token is in the support of its distribution. ``fork`` is
    the index of the first emitted token that differs, and ``margin`` the difference there between
    the logits of the target's likeliest token and the emitted one. ``noise`` is the largest
    difference between logits decoded one by one and as the rounds decoded them: at the fork, or in
    the last round with a draft if there is no fork. It is None if no round had a draft.
    """

    same: bool
    fork: int | None
    margin: float | None
    noise: float | None

    @property
    def explained(self) -> bool:
        """False if the noise cannot explain the fork: then the fork is a bug."""
        return self.margin is None or (self.noise is not None and self.margin <= 2 * self.noise)


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
    noise = (
        None
        if witness is None
        else _noise(target, prompt, rounds[: witness[0] + 1], witness[1], fork)
    )
    return Check(fork is None, fork, margin, noise)


def _noise(
    target: TokenSequence,
    prompt: Sequence[int],
    rounds: Sequence[Round],
    alone: list[Row],
    fork: int | None,
) -> float:
    """Return the largest difference from ``alone`` in the last of ``rounds``, decoded again."""
    target.truncate(0)
    tokens = list(prompt)
    for round in rounds:
        rows = target.eval([*tokens[target.n_past :], *round.draft.tokens], round.n_draft + 1)
        tokens += round.tokens
        target.truncate(len(tokens) - 1)
    n = min(len(alone), len(rows))
    first = n - 1 if fork is not None else 0
    return float(np.abs(rows[first:n] - np.stack(alone[first:n])).max())


def _margin(sampler: Sampler, row: Row, context: Sequence[int], token: int) -> float | None:
    """Return the margin of ``token``; None if the target alone could have emitted it."""
    logits = sampler.process(row, context)
    best = sampler.argmax(row, context)
    if sampler.greedy:
        # Greedy typical-p may take a token whose logit is not the best.
        return None if token == best else abs(float(logits[best] - logits[token]))
    is_possible = sampler.distribution(row, context).prob(token) > 0
    return None if is_possible else float(logits[best] - logits[token])
