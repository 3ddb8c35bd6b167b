"""Several texts in one context: each has its own tokens, and none disturbs another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny

from qdraft.errors import ContextError, EngineError
from qdraft.llama import context as context_module
from qdraft.llama.context import N_IDS, LlamaContext
from qdraft.llama.kv_copy import KvCopy, prove
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.sequence import LlamaSequence

TEXTS = ([2, 9, 4, 17, 5, 6, 2, 11, 20, 3], [25, 3, 3, 8, 14, 9, 21, 10, 2, 7])
PARAMS = EngineParams(n_ctx=256, n_threads=1)


@contextmanager
def opened(path: Path, params: EngineParams = PARAMS) -> Iterator[LlamaContext]:
    model = LlamaModel(path, params)
    try:
        context = LlamaContext(model, params)
        try:
            yield context
        finally:
            context.close()
    finally:
        model.close()


@pytest.fixture(scope="module", params=["mixture", "windowed"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sequences") / "model.gguf"
    return Path(getattr(tiny, request.param)(file))


def rows_of(sequence: LlamaSequence, tokens: list[int]) -> np.ndarray:
    """Rows of a batch of four, of two single tokens and of a batch after a rollback."""
    rows = [sequence.eval(tokens[:4], 4).copy()]
    rows += [sequence.eval([token], 1).copy() for token in tokens[4:6]]
    sequence.eval([1, 1], 0)
    sequence.truncate(6)
    rows.append(sequence.eval(tokens[6:], len(tokens) - 6).copy())
    return np.concatenate(rows)


def test_one_sequence_has_the_logits_of_a_context_of_two_ids(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ids change no bit of a text that is alone, nor does the text before it."""
    with opened(path) as context:
        first = context.sequence()
        many = rows_of(first, TEXTS[0])
        first.close()
        again = rows_of(context.sequence(), TEXTS[0])
    monkeypatch.setattr(context_module, "N_IDS", 2)
    with opened(path) as context:
        two = rows_of(context.sequence(), TEXTS[0])
    np.testing.assert_array_equal(many, two)
    np.testing.assert_array_equal(many, again)


def test_interleaved_texts_have_their_own_logits(path: Path) -> None:
    with opened(path) as context:
        alone = []
        for tokens in TEXTS:
            sequence = context.sequence()
            alone.append(np.concatenate([sequence.eval([t], 1).copy() for t in tokens]))
            sequence.close()
        both = [context.sequence(), context.sequence()]
        rows: list[list[np.ndarray]] = [[], []]
        for place in range(len(TEXTS[0])):
            for i, sequence in enumerate(both):
                rows[i].append(sequence.eval([TEXTS[i][place]], 1).copy())
                sequence.eval([1, 2], 0)  # and back
                sequence.truncate(place + 1)
        for i, sequence in enumerate(both):
            np.testing.assert_allclose(np.concatenate(rows[i]), alone[i], atol=1e-3)
            assert list(sequence.tokens) == TEXTS[i]
        assert np.abs(alone[0] - alone[1]).max() > 0.1  # the two texts do differ


def test_closing_one_leaves_the_other_untouched(path: Path) -> None:
    with opened(path) as context:
        stays, goes = context.sequence(), context.sequence()
        for i in range(5):
            stays.eval(TEXTS[0][2 * i : 2 * i + 2], 0)
            goes.eval(TEXTS[1][2 * i : 2 * i + 2], 0)
        before = stays.read_cells()
        goes.close()
        goes.close()
        assert np.array_equal(stays.read_cells(), before)
        new = context.sequence()
        assert new.id == goes.id
        assert new.n_past == 0
        new.eval(TEXTS[1], 0)
        assert np.array_equal(stays.read_cells(), before)
        stays.truncate(0)
        assert list(new.tokens) == TEXTS[1]


def test_ids_run_out_and_come_back(path: Path) -> None:
    with opened(path) as context:
        sequences = [context.sequence() for _ in range(N_IDS - 1)]
        assert context.spare_id not in {sequence.id for sequence in sequences}
        with pytest.raises(EngineError, match="holds 7 sequences already"):
            context.sequence()
        sequences[3].close()
        assert context.sequence().id == 3
    with pytest.raises(EngineError, match="closed"):
        context.sequence()


def test_a_closed_sequence_refuses(path: Path) -> None:
    with opened(path) as context:
        sequence = context.sequence()
        sequence.eval([2, 3], 0)
        sequence.close()
        for call in (lambda: sequence.eval([4], 1), lambda: sequence.truncate(1)):
            with pytest.raises(EngineError, match=r"this sequence of model\.gguf is closed"):
                call()
        live = context.sequence()
    with pytest.raises(EngineError, match=r"the context of model\.gguf is closed"):
        live.eval([4], 1)
    live.close()


def test_sequences_share_the_room_of_the_context(path: Path) -> None:
    with opened(path) as context:
        first, second = context.sequence(), context.sequence()
        assert first.n_ctx == second.n_ctx == 256
        first.eval([2] * 200, 0)
        assert (first.n_ctx, second.n_ctx) == (256, 56)
        with pytest.raises(ContextError, match="57 tokens do not fit the context of 56"):
            second.eval([3] * 57, 0)
        second.eval([3] * 56, 0)
        with pytest.raises(ContextError):
            first.eval([2], 1)
        second.close()
        first.eval([2] * 56, 0)


def test_a_cache_without_room_is_a_context_error(path: Path) -> None:
    """As llama.cpp says it itself: the sequence keeps what it held."""
    with opened(path) as context:
        context.n_ctx = 1000  # more than there is
        sequence = context.sequence()
        sequence.eval(TEXTS[0], 0)
        sequence.eval([4] * 200, 0)
        with pytest.raises(ContextError, match="has no room for 100 more"):
            sequence.eval([4] * 100, 1)
        assert list(sequence.tokens) == TEXTS[0] + [4] * 200
        assert sequence.eval([5], 1).shape == (1, context.vocab.n_tokens)


def test_keep_cuts_to_the_common_prefix(path: Path) -> None:
    with opened(path) as context:
        sequence = context.sequence()
        assert sequence.keep([1, 2]) == 0
        sequence.eval([2, 3, 4, 5, 6], 0)
        assert sequence.keep([2, 3, 4, 5, 6, 7, 8]) == 5
        assert sequence.keep([2, 3, 4, 9]) == 3
        assert list(sequence.tokens) == [2, 3, 4]
        assert sequence.keep([2, 3]) == 2
        kept = sequence.eval([9], 1).copy()
        assert sequence.keep([8, 2]) == 0
        sequence.eval([2, 3], 0)
        np.testing.assert_allclose(sequence.eval([9], 1), kept, atol=1e-3)


def test_cells_are_copied_between_interleaved_sequences(path: Path) -> None:
    """Two texts, each with a copy of its own, whole and in parts, bit for bit."""
    with opened(path) as target, opened(path) as draft:
        prove(target, draft)
        pairs = [(target.sequence(), draft.sequence()) for _ in TEXTS]
        copies = [KvCopy(*pair) for pair in pairs]
        for i, (source, destination) in enumerate(pairs):
            source.eval(TEXTS[i][:4], 0)
            copies[i].copy(0)
            destination.eval([1, 1, 1], 0)  # drafted, and thrown away
        for place in (4, 6, 8):
            for i, (source, destination) in enumerate(pairs):
                source.eval(TEXTS[i][place : place + 2], 1)
                copies[i].copy(place)
                destination.eval([1] * (1 + i), 0)
        for i, (source, destination) in enumerate(pairs):
            copies[i].copy(10)  # nothing new: the drafted ones go
            assert list(source.tokens) == list(destination.tokens) == TEXTS[i]
            assert np.array_equal(source.read_cells(), destination.read_cells())


def test_a_copy_that_is_refused_leaves_nothing_behind(path: Path) -> None:
    other = EngineParams(n_ctx=256, n_threads=1, cache_type_k="f32", cache_type_v="f32")
    with opened(path) as target, opened(path, other) as draft:
        source, destination = target.sequence(), draft.sequence()
        source.eval(TEXTS[0], 0)
        with pytest.raises(EngineError, match="does not take the target's KV cells"):
            KvCopy(source, destination).copy(0)
        assert destination.n_past == 0
        destination.eval(TEXTS[0], 0)
        with pytest.raises(EngineError):
            prove(target, draft)
        assert list(destination.tokens) == TEXTS[0]
