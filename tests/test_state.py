"""Models with a recurrent state, which goes back to checkpoints only: the law, rounds, faults."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from fakes import (
    GREEDY,
    PLAIN,
    PROMPT,
    distance,
    engine,
    run,
    table_logits,
    target_law,
    tokens_of,
    vocab,
)

from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.records import MAX_N_REREAD, Round
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.testing import FakeKvCopy, FakeSequence, FakeStateSequence, enumerate_law

N_VOCAB = 3


def state(
    n_vocab: int = N_VOCAB,
    blend: float = 0.0,
    n_back: int = 0,
    kind: type[FakeStateSequence] = FakeStateSequence,
) -> FakeStateSequence:
    """A model with a state, whose rows are those of ``fakes.engine``."""
    return kind(table_logits(n_vocab, 7, blend=blend), vocab(n_vocab), n_back=n_back)


def own_states(target: FakeStateSequence) -> Drafter:
    return ModelDrafter(state(blend=0.3), N_VOCAB)


def copied_states(target: FakeStateSequence) -> Drafter:
    draft = state(blend=0.3)
    return ModelDrafter(draft, N_VOCAB, FakeKvCopy(target, draft))


def state_beside_cells(target: FakeStateSequence) -> Drafter:
    return ModelDrafter(engine(N_VOCAB, 0.3), N_VOCAB)


def repetitions_first(target: FakeStateSequence) -> Drafter:
    return HybridDrafter(NgramDrafter(), own_states(target))


DRAFTERS = {
    "own": own_states,
    "copied": copied_states,
    "cells": state_beside_cells,
    "hybrid": repetitions_first,
}
block_or_token = pytest.mark.parametrize("block", [False, True], ids=["token", "block"])


def law(
    make_target: Callable[[], FakeSequence],
    make_drafter: Callable[[FakeSequence], Drafter],
    *,
    block: bool = True,
    p_min: float = 0.0,
) -> dict[tuple[int, ...], float]:
    def program(rng: Rng) -> tuple[int, ...]:
        target = make_target()
        rounds = run(
            target,
            make_drafter(target),
            params=PLAIN,
            n_predict=4,
            n_draft=2,
            rng=rng,
            block=block,
            p_min=p_min,
        )
        return tuple(tokens_of(list(rounds)))

    return enumerate_law(program)


def off(law: dict[tuple[int, ...], float]) -> float:
    return distance(law, target_law(PLAIN, N_VOCAB, 4))


@block_or_token
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("n_back", [0, 1])
def test_law_with_states_by_enumeration(drafter: str, n_back: int, block: bool) -> None:
    """The target alone, whatever the drafter; also where only a part can be taken back."""
    assert off(law(lambda: state(n_back=n_back), DRAFTERS[drafter], block=block)) < 1e-12


def test_law_where_the_draft_length_depends_on_the_draft() -> None:
    assert off(law(state, own_states, p_min=0.45)) < 1e-12


class _MarksLate(FakeStateSequence):
    """Remembers a state that has read a token too few for the place that it notes."""

    def checkpoint(self, n_ahead: int | None = None) -> None:
        self._marked = list(self.tokens), list(self.state[:-1])


class _ForgetsToReread(FakeStateSequence):
    """Claims the length that it was cut to, but its state is that of the checkpoint."""

    def truncate(self, n_past: int) -> None:
        tokens = self.tokens[:n_past]
        super().truncate(n_past)
        self.tokens = tokens


class _GoesBackTwice(FakeStateSequence):
    """Takes back twice as many tokens of its state as it was asked to."""

    def _take_back(self, n: int) -> None:
        super()._take_back(n)
        del self.state[-n:]


class _StaysAhead(FakeStateSequence):
    """Keeps the state of all tokens of the batch, as a rollback after two decodes would."""

    def _take_back(self, n: int) -> None:
        del self.tokens[-n:]


FAULTS: dict[str, tuple[type[FakeStateSequence], int]] = {
    "a checkpoint in the wrong place": (_MarksLate, 0),
    "tokens that are not read again": (_ForgetsToReread, 0),
    "a rollback twice": (_GoesBackTwice, 2),
    "no rollback at all": (_StaysAhead, 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_enumeration_catches_planted_faults_of_the_target(fault: str) -> None:
    kind, n_back = FAULTS[fault]
    assert off(law(lambda: state(n_back=n_back, kind=kind), own_states)) > 1e-3


@pytest.mark.parametrize(
    "fault", ["a checkpoint in the wrong place", "tokens that are not read again"]
)
def test_a_fault_of_the_draft_costs_acceptance_and_no_exactness(fault: str) -> None:
    """Rows of a draft may be any: the text keeps its law, and more tokens are rejected."""

    def drafter(target: FakeSequence) -> Drafter:
        return ModelDrafter(state(kind=FAULTS[fault][0]), N_VOCAB)

    assert off(law(state, drafter)) < 1e-12
    n_accepted = {
        kind: sum(r.n_accepted for r in greedy(state(8), ModelDrafter(state(8, 0.3, kind=kind), 8)))
        for kind in (FakeStateSequence, FAULTS[fault][0])
    }
    assert n_accepted[FakeStateSequence] > n_accepted[FAULTS[fault][0]]


def greedy(target: FakeSequence, drafter: Drafter, n_draft: int = 4) -> list[Round]:
    return list(run(target, drafter, params=GREEDY, n_predict=200, n_draft=n_draft))


@pytest.mark.parametrize("n_back", [0, 2, 4])
@pytest.mark.parametrize("copied", [False, True])
def test_greedy_equals_the_target_alone(n_back: int, copied: bool) -> None:
    target, draft = state(8, n_back=n_back), state(8, 0.3)
    drafter = ModelDrafter(draft, 8, FakeKvCopy(target, draft) if copied else None)
    rounds = greedy(target, drafter)
    assert tokens_of(rounds) == tokens_of(greedy(engine(), NoDrafter()))
    assert 0 < sum(r.n_accepted for r in rounds) < sum(r.n_draft for r in rounds)


def test_between_rounds_states_have_read_what_their_sequences_hold() -> None:
    target, draft = state(8), state(8, 0.3)
    text = list(PROMPT)
    for r in run(target, ModelDrafter(draft, 8), n_predict=100):
        text += r.tokens
        for sequence in (target, draft):
            assert sequence.tokens == sequence.state == text[: sequence.n_past]
        assert r.n_rows == r.n_reread + 1 + r.n_draft or r.n_prompt


def test_a_rejection_costs_the_target_no_pass_of_its_own() -> None:
    """Each round is one decode, with the accepted tokens of the rounds before in front."""
    target = state(8)
    rounds = greedy(target, ModelDrafter(state(8, 0.5), 8))
    assert target.widths == [len(PROMPT), *(r.n_rows for r in rounds[1:])]
    assert any(r.n_reread for r in rounds)
    for before, r in pairwise(rounds[1:]):
        rejected = before.n_accepted < before.n_draft
        expected = before.n_reread + before.n_emitted if rejected else 0
        assert r.n_reread == expected


def test_what_can_be_taken_back_is_not_read_again() -> None:
    rounds = greedy(state(8, n_back=4), ModelDrafter(state(8, 0.5), 8))
    assert any(r.n_accepted < r.n_draft for r in rounds)
    assert not any(r.n_reread for r in rounds)


def test_a_draft_reads_the_accepted_tokens_again_in_one_batch() -> None:
    """Its first row of a round reads all tokens since its checkpoint, then one row a token."""
    draft = state(8, 0.5)
    rounds = greedy(state(8), ModelDrafter(draft, 8))
    drafted = [r for r in rounds if r.n_draft]
    assert len(draft.widths) == sum(r.draft.n_rows for r in drafted) + 1  # and the prompt
    assert max(draft.widths[1:]) <= 1 + max(r.n_accepted for r in rounds) + 1


def test_rejections_in_a_row_do_not_make_the_batch_longer_and_longer() -> None:
    """A round without a draft settles what was read again too often, and emits a token itself."""
    target = state(8)
    hopeless = ModelDrafter(FakeSequence(lambda text: [-i for i in range(8)], vocab(8)), 8)
    rounds = greedy(target, hopeless)
    n_reread = [r.n_reread for r in rounds]
    assert MAX_N_REREAD < max(n_reread) <= MAX_N_REREAD + 1
    for r, after in pairwise(rounds):
        assert bool(r.n_draft) == (r.index > 0 and r.n_reread <= MAX_N_REREAD)
        if r.n_reread > MAX_N_REREAD:
            assert after.n_reread == 0
    assert tokens_of(rounds) == tokens_of(greedy(engine(), NoDrafter()))


def test_the_next_text_goes_on_where_the_state_is_or_begins_anew() -> None:
    target = state(8)
    target.eval([1, 2, 3, 4], 0)
    target.checkpoint()
    target.eval([5, 6], 0)
    assert target.keep([1, 2, 3, 4, 5, 6, 7]) == 6
    assert target.keep([1, 2, 3, 4, 5, 7]) == 4
    assert target.keep([1, 2, 4]) == 0


def test_another_seed_takes_other_paths() -> None:
    """The loops above are not one path in disguise: states went back in several lengths."""
    lengths = set()
    for seed in range(20):
        rounds = run(state(8), ModelDrafter(state(8, 0.3), 8), params=PLAIN, rng=SeededRng(seed))
        lengths |= {r.n_reread for r in rounds}
    assert len(lengths) > 4
