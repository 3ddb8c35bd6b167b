"""The table of kinds, what is built of it, and what drafters keep from text to text."""

from __future__ import annotations

from collections.abc import Sequence

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
from qdraft.decoding.policy.gate import CountingGate
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import UsageError
from qdraft.testing import FakeSequence


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
