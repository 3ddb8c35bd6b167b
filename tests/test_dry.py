"""DRY against llama.cpp's own sampler, and where its breakers are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qdraft import EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.dry import dry_penalties, find_breakers
from qdraft.decoding.sampling import Sampler
from qdraft.errors import UsageError
from qdraft.session.breakers import breakers_for
from qdraft.testing import FakeVocab

DRY = SamplingParams(dry_multiplier=0.8)


class TestPenalties:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ([1, 2, 3, 9, 1, 2], {3: 0.8}),  # "1 2" came before 3
            ([5, 1, 2, 3, 9, 5, 1, 2], {3: 0.8 * 1.75}),
            ([1, 2, 3, 1, 2, 4, 9, 1, 2], {3: 0.8, 4: 0.8}),
            ([1, 2, 9, 2], {}),  # one token is not yet a repetition
            ([7, 7, 7, 7], {7: 0.8 * 1.75}),
            ([1, 2], {}),
            ([], {}),
        ],
    )
    def test_the_longest_repetition_counts(
        self, text: list[int], expected: dict[int, float]
    ) -> None:
        assert dry_penalties(text, DRY, {}) == pytest.approx(expected)

    def test_no_repetition_goes_beyond_a_breaker(self) -> None:
        text = [5, 1, 2, 3, 9, 5, 1, 2]
        assert dry_penalties(text, DRY, {5: ((),)}) == {3: 0.8}
        assert dry_penalties(text, DRY, {1: ((),)}) == {}
        assert dry_penalties(text, DRY, {5: ((1,),)}) == {}  # two tokens make the breaker
        assert dry_penalties(text, DRY, {5: ((2,),)}) == pytest.approx({3: 1.4})
        assert dry_penalties(text, DRY, {3: ((),)}) == {}  # a breaker is never lowered

    def test_a_long_repetition_does_not_overflow(self) -> None:
        (penalty,) = dry_penalties([1] * 4000, replace(DRY, dry_base=10.0), {}).values()
        assert 1e30 < penalty < np.finfo(np.float32).max


class TestBreakers:
    vocab = FakeVocab([b"a", b"b", b"ab", b"x\n", b"\n", b"aq", b"q1", b"1"])

    def test_tokens_that_hold_a_breaker_or_its_start(self) -> None:
        assert find_breakers(self.vocab, ["\n"]) == {3: ((),), 4: ((),)}
        assert find_breakers(self.vocab, ["aq1"]) == {0: ((6,),), 5: ((7,),)}
        assert find_breakers(self.vocab, []) == {}

    def test_the_vocabulary_is_read_once(self) -> None:
        vocab = FakeVocab([b"a", b"\n"])
        assert breakers_for(DRY, vocab) is breakers_for(replace(DRY, temperature=0), vocab)
        assert breakers_for(SamplingParams(), vocab) is None

    def test_a_sampler_without_breakers_is_an_error(self) -> None:
        with pytest.raises(UsageError, match="dry_multiplier"):
            Sampler(DRY, 5)


TEXT = (
    'The keeper wrote: "the storm came from the west".\nThe keeper wrote: "the storm came from '
    'the north".\n* the storm came from the west, the keeper wrote. The keeper wrote'
)


@pytest.fixture(scope="module")
def target(source_file: Path) -> Iterator[Pair]:
    with Pair(PairSpec.of(source_file, None, EngineParams(n_ctx=512, n_threads=1))) as pair:
        yield pair


def llama_cpp_logits(
    vocab: Any, params: SamplingParams, row: np.ndarray, history: list[int]
) -> np.ndarray:
    """The row after llama.cpp's own DRY."""
    import llama_cpp

    texts = [text.encode() for text in params.dry_sequence_breakers]
    sampler = llama_cpp.llama_sampler_init_dry(
        vocab,
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        params.dry_penalty_last_n,
        (ctypes.c_char_p * len(texts))(*texts),
        len(texts),
    )
    for token in history:
        llama_cpp.llama_sampler_accept(sampler, token)
    n = len(row)
    data = (llama_cpp.llama_token_data * n)(*((i, float(x), 0.0) for i, x in enumerate(row)))
    array = llama_cpp.llama_token_data_array(data, n, -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    llama_cpp.llama_sampler_free(sampler)
    out = np.zeros(n, np.float32)
    for i in range(n):
        out[array.data[i].id] = array.data[i].logit
    return out


@pytest.mark.real
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dry_sequence_breakers": ()},
        {"dry_sequence_breakers": ("keeper wrote",), "dry_penalty_last_n": 400},
        {"dry_allowed_length": 1, "dry_base": 1.2, "dry_penalty_last_n": 30},
        {"dry_allowed_length": 0, "dry_sequence_breakers": ("st",)},
    ],
    ids=str,
)
def test_the_penalties_are_those_of_llama_cpp(target: Pair, changes: dict[str, Any]) -> None:
    params = replace(DRY, **changes)
    vocab = target.vocab
    sampler = Sampler(params, vocab.n_tokens, breakers=breakers_for(params, vocab))
    tokens = vocab.tokenize(TEXT, parse_special=False)
    n_lowered = 0
    for end in (3, 20, 31, 40, 47, len(tokens) - 1, len(tokens)):
        row = np.random.default_rng(end).normal(size=vocab.n_tokens).astype(np.float32)
        ours = sampler.process(row, tokens[:end])
        theirs = llama_cpp_logits(vocab._vocab, params, row, tokens[:end])
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        n_lowered += int((ours < row).sum())
    assert n_lowered
