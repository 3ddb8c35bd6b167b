"""The table of kinds, what is built of it, and what drafters keep from text to text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import GREEDY, PLAIN, PROMPT, engine, model_drafter, run, table_logits, tokens_of, vocab

from qdraft import DecodeParams
from qdraft.decoding.drafters.build import build_drafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.kinds import KINDS, only_repeats
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import NoDrafter, Verified
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.gate import CountingGate, Gate
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import Distribution, Draft
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import DrafterError, UsageError
from qdraft.testing import FakeClock, FakeSequence, ScriptedDrafter


def test_each_kind_of_the_table_can_be_asked_for_and_built() -> None:
    model = model_drafter()
    built = {kind: build_drafter(kind, model) for kind in KINDS}
    assert all(DecodeParams(drafter=kind).drafter == kind for kind in KINDS)
    assert built["model"] is model
    assert isinstance(built["ngram"], NgramDrafter)
    assert isinstance(built["hybrid"], HybridDrafter)
    with pytest.raises(UsageError, match="drafter is medusa but must be one of model, ngram"):
        DecodeParams(drafter="medusa")


def test_without_a_draft_model() -> None:
    assert isinstance(build_drafter("model", None), NoDrafter)
    assert isinstance(build_drafter("ngram", None), NgramDrafter)
    with pytest.raises(UsageError, match="the hybrid drafter needs a draft model"):
        build_drafter("hybrid", None)


def test_what_falls_back_runs_alone_on_a_kind_that_needs_no_draft_model() -> None:
    fallbacks = {kind: KINDS[kind].fallback for kind in KINDS}
    assert fallbacks == {"model": "ngram", "ngram": None, "hybrid": None}
    assert isinstance(build_drafter(fallbacks["model"] or "", None), NgramDrafter)


def test_only_n_grams_need_a_text_that_repeats_itself() -> None:
    assert [only_repeats(source) for source in ("ngram", "model", None)] == [True, False, False]


def test_the_n_gram_index_of_an_earlier_text_serves_its_continuation() -> None:
    rng, sampler = np.random.default_rng(2), Sampler(GREEDY, 9)
    first = [int(t) for t in rng.integers(0, 4, 60)]
    longer = [*first, *(int(t) for t in rng.integers(0, 4, 40))]
    other = [int(t) for t in rng.integers(0, 4, 80)]
    kept = NgramDrafter()
    for text in (first, longer, other, first):
        fresh = NgramDrafter()
        for drafter in (kept, fresh):
            drafter.begin(text[:-20])
        for end in range(len(text) - 20, len(text)):
            drafts = [
                drafter.draft(text[:end], CountingGate(4), sampler, SeededRng(0))
                for drafter in (kept, fresh)
            ]
            assert drafts[0].tokens == drafts[1].tokens


class SequenceWithFeatures(FakeSequence):
    """The hidden state of a token is its place and the token."""

    def __init__(self) -> None:
        super().__init__(table_logits(8, 7), vocab(8))
        self.n_asked = 0

    def features(self, n: int) -> np.ndarray:
        self.n_asked += 1
        assert n <= self.widths[-1]
        places = range(self.n_past - n, self.n_past)
        return np.array([(place, self.tokens[place]) for place in places], dtype=np.float32)


class Head(ModelDrafter):
    """Keeps the hidden states that it gets."""

    needs_features = True

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self.states: list[list[float]] = []

    def accept(self, verified: Verified) -> None:
        super().accept(verified)
        assert verified.features is not None
        self.states += verified.features.tolist()


def test_a_drafter_that_needs_features_gets_those_of_the_text_once_and_in_order() -> None:
    drafter = Head(engine(8, 0.3), 8)
    rounds = list(run(SequenceWithFeatures(), drafter, params=PLAIN, n_predict=60))
    text = [*PROMPT, *tokens_of(rounds)]
    assert drafter.states == [[place, token] for place, token in enumerate(text[:-1])]
    assert any(0 < round.n_accepted < round.n_draft for round in rounds)


def test_features_cost_nothing_if_nobody_needs_them() -> None:
    target = SequenceWithFeatures()
    list(run(target, model_drafter()))
    assert target.n_asked == 0


def test_a_target_without_features_is_refused() -> None:
    with pytest.raises(UsageError, match="needs hidden states, but the target offers none"):
        next(run(engine(), Head(engine(8, 0.3), 8)))


def over(probs: Sequence[float], ids: Sequence[int] | None = None) -> Distribution:
    return Distribution(np.array(probs), None if ids is None else np.array(ids))


EVEN = over([0.25] * 4)
# What a drafter of one's own may get wrong, in a vocabulary of 4 tokens and with a gate of 3.
MISTAKES = {
    "offers 4 tokens, but its gate admitted 3": Draft((0, 1, 2, 3), (EVEN,) * 4),
    "offers 64 tokens, but a draft has 63 at most": Draft((1,) * 64),
    "offers token 4, but the vocabulary has 4": Draft((0, 4)),
    "offers token -1, but the vocabulary has 4": Draft((-1,)),
    "offers token 1.5, but the vocabulary has 4": Draft((1.5,)),  # type: ignore[arg-type]
    "offers 2 tokens with 1 distributions": Draft((0, 1), (EVEN,)),
    "offers 1 tokens with 2 confidences": Draft((0,), None, "own", (0.5, 0.5)),
    "has the confidence nan": Draft((0,), None, "own", (np.nan,)),
    "has the confidence -0.5": Draft((0,), None, "own", (-0.5,)),
    "q for token 2 of its draft that gives token 3, which was drawn, no probability": Draft(
        (0, 3), (EVEN, over([0.5, 0.5, 0, 0]))
    ),
    "gives token 2, which was drawn, no": Draft((2,), (over([0.5, 0.5], [0, 3]),)),
    "that is not finite": Draft((0,), (over([0.5, np.nan, 0.5]),)),
    "q for token 1 of its draft that is not finite": Draft((0,), (over([np.inf, 0.5]),)),
    "is negative for some token": Draft((0,), (over([1.25, -0.25]),)),
    "sums to 0.75, not to 1": Draft((0,), (over([0.5, 0.25]),)),
    "has the shape (1, 4)": Draft((0,), (Distribution(np.full((1, 4), 0.25)),)),
    "has the shape (0,)": Draft((0,), (over([]),)),
    "covers 5 tokens, but the vocabulary has 4": Draft((0,), (over([0.2] * 5),)),
    "does not have 2 ascending ids": Draft((0,), (over([0.5, 0.5], [3, 0]),)),
    "does not have 2 ascending ids of": Draft((0,), (over([0.5, 0.5], [0, 0]),)),
    "does not have 2 ascending ids of a vocabulary": Draft((0,), (over([0.5, 0.5], [0, 4]),)),
    "does not have 2 ascending ids of a vocabulary of 4": Draft((0,), (over([0.5, 0.5], [0]),)),
}


class OneDraft(NoDrafter):
    """Takes from its gate what it gets, and then offers the same draft in every round."""

    def __init__(self, offer: Draft) -> None:
        self._offer = offer

    def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
        n = 0
        while gate.more("own") and gate.take("own", 1.0):
            n += 1
        return self._offer if n >= min(3, self._offer.n) else Draft()


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_drafter_is_an_error_that_names_it(mistake: str, block: bool) -> None:
    offer = replace(MISTAKES[mistake], source="own")
    target = engine(4)
    rounds = run(target, OneDraft(offer), params=PLAIN, n_draft=3, block=block)
    assert next(rounds).n_draft == 0
    n_past = target.n_past
    with pytest.raises(DrafterError, match=r"the drafter 'own' .*" + re.escape(mistake)) as caught:
        next(rounds)
    assert caught.value.hint
    assert target.n_past == n_past  # the target has read none of it


def test_a_drafter_that_does_not_ask_its_gate_never_exceeds_n_predict() -> None:
    class Deaf(ScriptedDrafter):
        def draft(self, context: Sequence[int], gate: Gate, sampler: Sampler, rng: Rng) -> Draft:
            return Draft((0,) * 10, None, "deaf")

    with pytest.raises(DrafterError, match="offers 10 tokens, but its gate admitted 0"):
        list(run(engine(), Deaf(lambda context: []), n_predict=3))


def test_what_a_drafter_may_offer() -> None:
    """Fewer than the gate took, numpy's integers, no confidences, a q of fewer tokens, float32."""
    single = Distribution(np.full(3, 1 / 3, np.float32))  # type: ignore[arg-type]
    for offer in (
        Draft(),
        Draft((np.int32(3), np.int64(0))),  # type: ignore[arg-type]
        Draft((0, 3), (single, over([0.5, 0.5], [2, 3]))),
    ):
        rounds = list(run(engine(4), OneDraft(offer), params=PLAIN, n_draft=3, n_predict=9))
        assert len(tokens_of(rounds)) == 9


def test_an_unknown_rule_of_verification_is_an_error() -> None:
    with pytest.raises(UsageError, match="verification is typical but must be one of"):
        Decoding(
            engine(),
            NoDrafter(),
            PROMPT,
            Sampler(GREEDY, 8),
            FixedSchedule(4),
            SeededRng(0),
            FakeClock(),
            verification="typical",
        )
