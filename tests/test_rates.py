"""The one definition of each rate and cost, from rounds whose figures are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fakes import PROMPT_ROUND as PROMPT
from fakes import engine, model_drafter, run
from fakes import make_round as make

from qdraft.decoding.rates import (
    Counts,
    alpha_by_place,
    by_place,
    count,
    draft_cost,
    sum_min,
    target_seconds,
    verify_costs,
)
from qdraft.decoding.records import FinishReason
from qdraft.decoding.summary import summarize


class EndsAfter:
    """Ends a text after ``n`` tokens, wherever that is in a round."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    def take(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        read = tuple(tokens[: self.n_left])
        self.n_left -= len(read)
        return read, None if self.n_left else FinishReason.STOP_STRING


def test_tau_counts_what_was_emitted() -> None:
    """Accepted tokens and one more per round would be one too many here."""
    rounds = list(run(engine(), model_drafter(blend=0.0), reader=EndsAfter(9)))
    cut = rounds[-1]
    assert cut.n_accepted == cut.n_emitted < cut.n_draft
    counts = count(rounds)
    assert counts.n_emitted == counts.n_accepted + counts.n_rounds - 1
    assert counts.tau == pytest.approx(counts.n_emitted / counts.n_rounds)
    assert summarize(rounds).tau == counts.tau


def test_counts_add_up() -> None:
    rounds = [PROMPT, make(3, 1), make(3, 3), make(0, 0), make(2, 0)]
    counts = count(rounds)
    assert counts == Counts(n_rounds=3, n_drafted=8, n_tested=6, n_accepted=4, n_emitted=7)
    assert counts == count(rounds[:2]) + count(rounds[2:])
    assert (counts.alpha, counts.draft_yield, counts.tau) == (4 / 6, 4 / 8, 7 / 3)
    assert (Counts().alpha, Counts().draft_yield, Counts().tau) == (None, None, None)


def test_alpha_by_place() -> None:
    rounds = [make(3, 1), make(3, 3), make(0, 0), make(2, 0)]
    assert by_place(rounds) == ((3, 2, 1), (2, 1, 1))
    assert alpha_by_place(*by_place(rounds)) == (2 / 3, 1 / 2, 1.0)
    assert alpha_by_place((0,), (0,)) == (None,)


def test_sum_min_is_the_chance_that_a_draw_from_q_is_accepted() -> None:
    rng = np.random.default_rng(4)
    p, q = rng.dirichlet(np.ones(6), size=2)
    accepted = float(np.sum(q * np.minimum(1, p / q)))
    assert sum_min(p, q) == pytest.approx(accepted)


def test_costs_are_over_the_target_alone() -> None:
    rounds = [make(0, 0, verify_s=2.0), make(2, 2, draft_s=1.0, verify_s=3.0)]
    rounds.append(make(2, 1, draft_s=9.0, verify_s=3.0, n_caught_up=50))  # read the prompt first
    target_s = target_seconds(rounds)
    assert target_s == 2.0
    assert draft_cost(rounds, target_s) == 0.25
    assert verify_costs(rounds, target_s) == {3: 1.5}
    assert (target_seconds(rounds[1:]), draft_cost(rounds, None)) == (None, None)
    assert verify_costs(rounds, None) == {}
