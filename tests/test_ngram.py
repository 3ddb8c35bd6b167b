"""Drafting from repetitions: the newest match, the longest first, exact like any other draft."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import (
    GREEDY,
    PLAIN,
    distance,
    engine,
    model_drafter,
    run,
    table_logits,
    target_law,
    tokens_of,
    vocab,
)

from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import NoDrafter
from qdraft.decoding.policy.gate import CountingGate
from qdraft.decoding.policy.schedule import CostAwareSchedule, FixedSchedule
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.testing import FakeSequence, enumerate_law


def propose(context: list[int], n: int = 4, drafter: NgramDrafter | None = None) -> tuple[int, ...]:
    drafter = drafter or NgramDrafter()
    return drafter.draft(context, CountingGate(n), Sampler(GREEDY, 100), SeededRng(0)).tokens


def test_the_longest_end_and_the_newest_place() -> None:
    assert propose([1, 2, 3, 9, 8, 1, 2, 3]) == (9, 8, 1, 2)
    assert propose([5, 1, 2, 7, 6, 1, 2, 4, 4, 1, 2]) == (4, 4, 1, 2)
    assert propose([1, 2, 3, 7, 0, 2, 3, 6, 1, 2, 3]) == (7, 0, 2, 3)  # three beat a newer two
    assert propose([1, 2, 3, 4]) == ()
    assert propose([1, 2]) == ()


def test_a_repetition_runs_on_into_the_draft() -> None:
    assert propose([1, 2, 1, 2], n=6) == (1, 2, 1, 2, 1, 2)


def test_the_index_grows_with_the_text_and_starts_afresh() -> None:
    drafter, whole = NgramDrafter(), [int(t) for t in np.random.default_rng(1).integers(0, 4, 200)]
    drafter.begin(whole[:3])
    for n in range(3, 200):
        assert propose(whole[:n], drafter=drafter) == propose(whole[:n])
    drafter.begin([1, 2])
    assert propose([1, 2], drafter=drafter) == ()


def test_a_longer_match_is_more_confident() -> None:
    def confidence(context: list[int]) -> float:
        draft = NgramDrafter().draft(context, CountingGate(1), Sampler(GREEDY, 100), SeededRng(0))
        return draft.confidence[0]

    assert confidence([1, 2, 9, 1, 2]) == pytest.approx(0.75)
    assert confidence([5, 6, 7, 1, 2, 9, 5, 6, 7, 1, 2]) == pytest.approx(1 - 2**-5)


def test_greedy_text_is_the_targets() -> None:
    rounds = list(run(engine(), NgramDrafter(), n_predict=200))
    assert tokens_of(rounds) == tokens_of(list(run(engine(), NoDrafter(), n_predict=200)))
    assert sum(r.n_accepted for r in rounds) > 50  # this target runs in circles
    assert {r.source for r in rounds if r.n_draft} == {"ngram"}


@pytest.mark.parametrize("block", [False, True])
def test_the_law_is_the_targets(block: bool) -> None:
    def program(rng: Rng) -> tuple[int, ...]:
        rounds = run(
            engine(3),
            NgramDrafter(),
            params=PLAIN,
            n_predict=4,
            n_draft=2,
            rng=rng,
            block=block,
            prompt=(1, 2, 0, 1, 2),
        )
        return tuple(tokens_of(list(rounds)))

    assert distance(enumerate_law(program), target_law(PLAIN, 3, 4, prompt=(1, 2, 0, 1, 2))) < 1e-12


def test_under_the_cost_aware_schedule() -> None:
    """No model to pay for: a text in circles is drafted far, one without repetition is left alone."""
    circles = list(run(engine(), NgramDrafter(), schedule=CostAwareSchedule(8), n_predict=300))
    assert sum(r.n_accepted for r in circles) > 150
    never = table_logits(8, 7)
    wild = FakeSequence(lambda t: never((len(t) % 7, (len(t) * len(t)) % 5, *t)), vocab(8))
    rounds = list(run(wild, NgramDrafter(), schedule=CostAwareSchedule(8), n_predict=300))
    assert len(tokens_of(rounds)) == 300


def hybrid(model: ModelDrafter) -> HybridDrafter:
    return HybridDrafter(NgramDrafter(), model)


class TestHybrid:
    def drafter(self, blend: float = 0.3) -> HybridDrafter:
        return hybrid(model_drafter(3, blend))

    @pytest.mark.parametrize("block", [False, True])
    def test_the_law_is_the_targets(self, block: bool) -> None:
        prompt = (1, 2, 0, 1, 2)

        def program(rng: Rng) -> tuple[int, ...]:
            rounds = list(
                run(
                    engine(3),
                    self.drafter(),
                    params=PLAIN,
                    n_predict=4,
                    n_draft=2,
                    rng=rng,
                    block=block,
                    prompt=prompt,
                )
            )
            sources.update(r.source for r in rounds)
            return tuple(tokens_of(rounds))

        sources: set[str] = set()
        law = enumerate_law(program)
        assert distance(law, target_law(PLAIN, 3, 4, prompt=prompt)) < 1e-12
        assert sources >= {"ngram", "model"}

    def test_repetitions_first_the_model_elsewhere(self) -> None:
        drafter = hybrid(model_drafter(blend=0.2))
        schedule = CostAwareSchedule(8)
        rounds = list(run(engine(), drafter, n_predict=300, schedule=schedule))
        assert tokens_of(rounds) == tokens_of(list(run(engine(), NoDrafter(), n_predict=300)))
        accepted = {
            s: sum(r.n_accepted for r in rounds if r.source == s) for s in ("ngram", "model")
        }
        assert accepted["ngram"] > 50

    def test_a_round_that_was_paid_for_is_counted(self) -> None:
        """The model was asked and nothing was offered: its rows are the round's."""
        drafter = hybrid(model_drafter(blend=1.0))
        rounds = list(run(engine(), drafter, n_predict=60, schedule=FixedSchedule(4, p_min=0.999)))
        assert any(r.draft.n_rows and not r.n_draft for r in rounds)

    def test_caches_stay_in_step_over_changes_of_source(self) -> None:
        model = model_drafter(blend=0.0)
        rounds = list(run(engine(), hybrid(model), n_predict=120, n_draft=3))
        assert {r.source for r in rounds if r.n_draft} == {"ngram", "model"}
        assert all(r.n_accepted == r.n_draft for r in rounds if r.source == "model")
