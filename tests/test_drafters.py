"""The table of kinds, what is built of it, and what drafters keep from text to text."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import GREEDY, model_drafter

from qdraft import DecodeParams
from qdraft.decoding.drafters.build import build_drafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.kinds import KINDS, only_repeats
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import NoDrafter
from qdraft.decoding.policy.gate import CountingGate
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import UsageError


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
