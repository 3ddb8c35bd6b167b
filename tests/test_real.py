"""Real models through the Python API: the promises that a fake cannot show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import qdraft
from qdraft import DecodeParams, EngineParams, FinishReason, Origin, Pair, PairSpec, SamplingParams
from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.errors import EngineError, ModelFileError, UsageError
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.session.check import Check
from qdraft.session.generation import Generation
from qdraft.session.learning import Learning

pytestmark = pytest.mark.real

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
# SmolLM2's end-of-generation tokens: banned, a text goes on to its budget.
ENDLESS = dict.fromkeys((0, 2, 4), -np.inf)


def fixed(**kwargs: object) -> DecodeParams:
    """Draft lengths that do not follow the clock: drafting and seeds are what is under test."""
    return DecodeParams(**{"draft_policy": "fixed", **kwargs})  # type: ignore[arg-type]


PROMPTS = [
    "Write a Python function that sorts a list.",
    "What is the capital of France?",
    "Tell me a short story about a dragon.",
    "List three prime numbers and explain why they are prime.",
]


@pytest.fixture(scope="module")
def exact_pair(smollm2: tuple[Path, Path], source_file: Path) -> Iterator[Pair]:
    """The Q4_1 file as target: with one thread, rows of small batches are those of rows alone."""
    params = EngineParams(n_ctx=1024, n_threads=1)
    with Pair(PairSpec.of(source_file, smollm2[1], params)) as pair:
        yield pair


@pytest.fixture(scope="module")
def pair(smollm2: tuple[Path, Path]) -> Iterator[Pair]:
    with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=1024))) as opened:
        yield opened


@pytest.fixture(scope="module")
def self_pair(source_file: Path) -> Iterator[Pair]:
    # One thread: with more, llama.cpp splits the attention of a single row over the threads
    # once the cache passes 256 cells, and a row alone differs from the same row in a batch.
    with Pair(
        PairSpec.of(source_file, source_file, EngineParams(n_ctx=1024, n_threads=1))
    ) as opened:
        yield opened


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_the_target_alone(exact_pair: Pair, prompt: str) -> None:
    drafted = exact_pair.generate(prompt, GREEDY, fixed(n_predict=48))
    drafted.read()
    alone = exact_pair.generate(prompt, GREEDY, fixed(n_predict=48, n_draft=0))
    alone.read()
    assert drafted.tokens == alone.tokens
    assert drafted.check() == Check(same=True, by_token=True, fork=None, margin=None, noise=0)
    summary = drafted.summary
    assert summary.alpha is not None
    assert 0.2 < summary.alpha < 1
    assert summary.n_tokens == len(drafted.tokens)
    assert summary.speedup is not None


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "temperature 1"])
def test_a_file_paired_with_itself_accepts_nearly_everything(
    self_pair: Pair, sampling: SamplingParams
) -> None:
    params = SamplingParams(
        temperature=sampling.temperature, top_k=0, top_p=1, min_p=0, logit_bias=ENDLESS
    )
    prompt = PROMPTS[2]
    while len(self_pair.vocab.tokenize(prompt)) < 190:  # with the chat template 30 tokens more
        prompt += " It guards a mountain."
    text = self_pair.generate(prompt, params, fixed(n_predict=300, seed=1))
    text.read()
    assert len(text.tokens) == 300
    n_cells = len(text.prompt) + 300
    assert len(text.prompt) < 256 < 512 < n_cells  # two edges of the cache view
    assert text.summary.alpha is not None
    assert text.summary.alpha >= 0.98
    drafted = [r for r in text.rounds if r.n_draft]
    late = drafted[len(drafted) // 2 :]
    assert sum(r.n_accepted for r in late) >= 0.98 * sum(r.n_tested for r in late)
    assert text.check().noise == 0
    assert text.summary.alpha == 1


def test_both_of_a_self_pair_share_the_weights(self_pair: Pair) -> None:
    contexts = self_pair.contexts
    assert contexts.draft is not None
    assert contexts.draft is not contexts.target
    assert contexts.draft.model is contexts.target.model


def measure_acceptance(pair: Pair) -> tuple[int, int]:
    """Accepted and tested tokens of a text for each prompt; the first text is checked."""
    accepted = tested = 0
    for prompt in PROMPTS:
        text = pair.generate(prompt, GREEDY, fixed(n_predict=56))
        text.read()
        accepted += text.summary.n_accepted
        tested += text.summary.n_tested
        assert prompt != PROMPTS[0] or text.check().explained
    return accepted, tested


@pytest.fixture(scope="module")
def acceptance(pair: Pair) -> tuple[int, int]:
    return measure_acceptance(pair)


def test_acceptance_of_a_known_pair(acceptance: tuple[int, int]) -> None:
    """A version of the library that changes acceptance much does not go unnoticed.

    https://github.com/ggml-org/llama.cpp/issues/23544
    """
    accepted, tested = acceptance
    assert tested > 100
    assert 0.65 < accepted / tested < 0.95


def test_a_seed_gives_one_text_whatever_is_drafted(exact_pair: Pair) -> None:
    sampling = SamplingParams(temperature=1.0)
    texts = []
    for drafter, n_draft in (("model", 0), ("model", 3), ("ngram", 4), ("hybrid", 5)):
        params = fixed(
            n_predict=40, n_draft=n_draft, drafter=drafter, verification="coupled", seed=5
        )
        text = exact_pair.generate(PROMPTS[0], sampling, params)
        text.read()
        texts.append(text.tokens)
        noise = 0 if any(r.n_draft for r in text.rounds) else None
        assert text.check() == Check(same=True, by_token=True, fork=None, margin=None, noise=noise)
    assert texts == [texts[0]] * 4
    params = fixed(n_predict=40, verification="coupled", seed=6)
    assert exact_pair.generate(PROMPTS[0], sampling, params).read() != text.text


def test_sampled_text_stays_in_the_support(pair: Pair) -> None:
    text = pair.generate(PROMPTS[2], SamplingParams(), fixed(n_predict=50, seed=3))
    text.read()
    check = text.check()
    assert check.same
    assert check.noise is not None
    assert check.noise < 1
    assert text.seed == 3


def test_same_seed_same_text(pair: Pair) -> None:
    def text(seed: int) -> str:
        return pair.generate(PROMPTS[2], PLAIN, fixed(n_predict=40, seed=seed)).read()

    assert text(1) == text(1) != text(2)


def test_chunks_equal_the_whole(pair: Pair) -> None:
    text = pair.generate(
        "Answer with emoji and Japanese: 日本語 🦙", PLAIN, fixed(n_predict=60, seed=5)
    )
    chunks = list(text)
    pieces = b"".join(pair.vocab.piece(t) for t in text.tokens)
    assert "".join(chunk.text for chunk in chunks) == text.text == pieces.decode("utf-8", "replace")
    assert [chunk.token for chunk in chunks if chunk.token is not None] == text.tokens
    assert {chunk.origin for chunk in chunks} >= {Origin.DRAFT, Origin.TARGET}


def test_auto_drafts_what_pays_and_keeps_what_it_learned(smollm2: tuple[Path, Path]) -> None:
    # One thread: under contention qdraft would halve more, and not store what it measured.
    spec = PairSpec.of(*smollm2, EngineParams(n_ctx=512, n_threads=1))
    with Pair(spec, learning=Learning.stored) as opened:
        text = opened.generate(PROMPTS[0], GREEDY, DecodeParams(n_predict=60))
        text.read()
        assert text.check().explained
        assert len(text.tokens) == 60
        assert opened.learned.costs.complete
        assert text.summary.conclusion
        learned = opened.learned.costs.medians(CONSTANTS.n_to_keep)
    with Pair(spec, learning=Learning.stored) as again:
        # What loading has measured comes first, all else is that of the earlier run.
        known = again.learned.costs.medians()
        assert {n: known.v[n] for n in learned.v if n != 8} == {
            n: v for n, v in learned.v.items() if n != 8
        }
    with Pair(spec) as fresh:
        assert fresh.learned.costs.complete
        assert list(fresh.learned.costs.medians().v) == [8]


def test_stop_string(pair: Pair) -> None:
    whole = pair.generate(PROMPTS[1], GREEDY, fixed(n_predict=60)).read()
    stop = whole.split()[3]
    cut = pair.generate(PROMPTS[1], GREEDY, fixed(n_predict=60, stop=(stop,)))
    assert cut.read() == whole[: whole.index(stop)]
    assert cut.finish_reason is FinishReason.STOP_STRING


def test_end_of_turn_ends_the_text(pair: Pair) -> None:
    text = pair.generate("Say only: hello", GREEDY, fixed(n_predict=400))
    text.read()
    assert text.finish_reason is FinishReason.END_OF_GENERATION
    assert pair.vocab.is_end(text.tokens[-1])
    assert "<|im_end|>" not in text.text


def test_a_prompt_longer_than_the_batch(smollm2: tuple[Path, Path]) -> None:
    """A prompt longer than the batch is read in parts, by both models.

    https://github.com/ggml-org/llama.cpp/issues/10670
    """
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=1024, n_batch=64, n_ubatch=32))) as small:
        text = small.generate(prompt, GREEDY, fixed(n_predict=24), raw=True)
        text.read()
        assert len(text.prompt) > 4 * 64
        assert text.check().explained
        assert text.summary.alpha is not None
        assert text.summary.alpha > 0.5  # a draft that misread the prompt accepts nothing


def test_context_full(smollm2: tuple[Path, Path]) -> None:
    with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=64))) as small:
        endless = SamplingParams(temperature=0, logit_bias=ENDLESS)
        text = small.generate(PROMPTS[2], endless)
        text.read()
        assert text.finish_reason is FinishReason.CONTEXT_FULL
        assert len(text.prompt) + len(text.tokens) == 64
        with pytest.raises(qdraft.ContextError, match=r"the prompt has \d+ tokens.*holds 64"):
            small.generate("word " * 100).read()


def test_a_draft_that_does_not_load_is_an_error(smollm2: tuple[Path, Path], tmp_path: Path) -> None:
    """qdraft never falls back to the target alone in silence, and refuses the file before loading.

    https://github.com/ggml-org/llama.cpp/pull/24922
    https://github.com/ggml-org/llama.cpp/pull/6885
    """
    half = tmp_path / "half.gguf"
    half.write_bytes(smollm2[1].read_bytes()[:1_000_000])
    with pytest.raises(ModelFileError, match=r"half.gguf is (a damaged GGUF|cut off)"):
        Pair(PairSpec.of(smollm2[0], half))


def test_rows_are_those_of_the_last_tokens(source_file: Path) -> None:
    """One batch of several steps gives the rows that one-by-one decoding gives."""
    model = LlamaModel(source_file, EngineParams())
    context = LlamaContext(model, EngineParams(n_ctx=256, n_batch=128, n_ubatch=64))
    engine = context.sequence()
    tokens = model.vocab.tokenize("The quick brown fox jumps over the lazy dog. " * 12)[:110]
    rows = engine.eval(tokens, 3).copy()
    assert rows.shape == (3, model.vocab.n_tokens)
    assert engine.n_past == 110
    engine.truncate(107)
    for i in range(3):
        alone = engine.eval([tokens[107 + i]], 1)[0]
        np.testing.assert_allclose(rows[i], alone, atol=0.5)
        assert rows[i].argmax() == alone.argmax()
    assert engine.eval([1], 0).shape == (0, model.vocab.n_tokens)
    assert context.decode_s > 0
    context.close()
    model.close()
    with pytest.raises(EngineError, match="closed"):
        _ = model.native


def test_gpu_options_on_a_build_without_gpu(source_file: Path) -> None:
    from qdraft.llama.devices import devices

    if any(device.takes_layers for device in devices()):
        pytest.skip("this build has a GPU")
    for params, words in (
        (EngineParams(n_gpu_layers=3), "this build of llama-cpp-python has no device for them"),
        (EngineParams(tensor_split=(1.0,)), "tensor_split needs a GPU, but this build"),
    ):
        with pytest.raises(UsageError, match=words):
            Pair(PairSpec.of(source_file, None, params))


def test_texts_take_turns_in_one_thread_and_in_two(pair: Pair) -> None:
    """Each is the text that it is alone, whatever is written between its rounds."""

    def start(place: int) -> Generation:
        return pair.generate(PROMPTS[place], GREEDY, fixed(n_predict=8))

    alone = [start(place).read() for place in range(2)]
    first = iter(start(0))
    chunks = [next(first)]
    assert start(1).read() == alone[1]
    texts: list[str] = []
    other = threading.Thread(target=lambda: texts.append(start(1).read()))
    other.start()
    chunks += first
    other.join(timeout=60)
    assert "".join(chunk.text for chunk in chunks) == alone[0]
    assert texts == alone[1:]


def test_leaving_a_text_early_frees_the_pair(pair: Pair) -> None:
    text = pair.generate(PROMPTS[0], GREEDY, fixed(n_predict=50))
    for chunk in text:
        if chunk.round_index == 4:
            break
    assert text.finish_reason is FinishReason.INTERRUPTED
    whole = b"".join(pair.vocab.piece(t) for t in text.tokens).decode()
    assert text.text == whole  # also what the loop did not get to see
    assert pair.generate(PROMPTS[1], GREEDY, fixed(n_predict=4)).read()


def test_closing_in_the_middle_ends_the_text(smollm2: tuple[Path, Path]) -> None:
    opened = Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=256)))
    text = opened.generate(PROMPTS[2], GREEDY, fixed(n_predict=60))
    chunks = iter(text)
    for _ in range(12):
        next(chunks)
    opened.close()
    assert list(chunks) == []
    assert text.finish_reason is FinishReason.INTERRUPTED
    assert 12 <= len(text.tokens) < 60


def test_closing_ends_another_threads_text(smollm2: tuple[Path, Path]) -> None:
    """The round that the thread is in is finished first: nothing is freed under it."""
    for _ in range(3):
        opened = Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=256)))
        text = opened.generate(PROMPTS[2], GREEDY, fixed(n_predict=200))
        started = threading.Event()

        def read(text: Generation = text, started: threading.Event = started) -> None:
            for _ in text:
                started.set()

        other = threading.Thread(target=read)
        other.start()
        started.wait(timeout=60)
        opened.close()
        n_tokens = len(text.tokens)
        other.join(timeout=60)
        assert not other.is_alive()
        assert 0 < len(text.tokens) == n_tokens < 200
        assert text.finish_reason is FinishReason.INTERRUPTED


def test_twenty_texts_in_a_row_stay_in_step(shallow: tuple[Path, Path]) -> None:
    """Both caches are as good for the twentieth text as for the first.

    https://github.com/lablup/mlxcel/issues/994
    """
    target = shallow[0]
    with Pair(PairSpec.of(target, target, EngineParams(n_ctx=1024, n_threads=1))) as opened:
        for turn in range(20):
            text = opened.generate(
                f"{PROMPTS[turn % 4]} ({turn})", PLAIN, fixed(n_predict=12, seed=turn)
            )
            text.read()
            assert text.summary.n_tested > 3
            assert text.summary.alpha is not None
            assert text.summary.alpha >= 0.98


class TestSharedKv:
    """The draft works on copies of the target's cells."""

    def test_sharing_is_proven_and_raises_acceptance(
        self, smollm2: tuple[Path, Path], pair: Pair, acceptance: tuple[int, int]
    ) -> None:
        assert pair.kv.shared
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512), share_kv="off")) as opened:
            assert not opened.kv.shared
            accepted, tested = measure_acceptance(opened)
        assert acceptance[0] / acceptance[1] > accepted / tested

    def test_the_copied_cells_are_the_targets_bit_for_bit(self, smollm2: tuple[Path, Path]) -> None:
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512))) as opened:
            session = opened.session()
            text = session.generate(PROMPTS[0], PLAIN, fixed(n_predict=60, seed=2))
            text.read()
            sequences = session.sequences
            assert sequences is not None
            draft, kv_copy = sequences.draft, sequences.kv_copy
            assert kv_copy is not None
            assert draft is not None
            kv_copy.copy(len(text.prompt))  # what earlier copies brought stays
            assert draft.n_past == sequences.target.n_past
            in_parts = draft.eval([5], 1)[0].copy()
            kv_copy.copy(0)
            assert np.array_equal(draft.read_cells(), sequences.target.read_cells())
            np.testing.assert_array_equal(draft.eval([5], 1)[0], in_parts)

    def test_caches_of_other_types_keep_their_own(self, smollm2: tuple[Path, Path]) -> None:
        other = EngineParams(n_ctx=512, cache_type_k="q8_0", cache_type_v="q8_0")
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512), draft_params=other)) as opened:
            assert not opened.kv.shared
            assert "does not take the target's KV cells" in opened.kv.reason
            assert opened.generate(PROMPTS[1], GREEDY, fixed(n_predict=20)).read()
        with pytest.raises(qdraft.PairError, match="cannot be shared"):
            Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512), draft_params=other, share_kv="on"))

    def test_another_model_of_the_same_cache_shape_is_refused(
        self, smollm2: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = iter([("llama", "576"), ("llama", "512")])
        monkeypatch.setattr(LlamaModel, "shape", property(lambda self: next(other)))
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512))) as opened:
            assert opened.kv.reason == "target and draft are different models"

    def test_sharing_on_demand_needs_a_draft(self, smollm2: tuple[Path, Path]) -> None:
        with pytest.raises(qdraft.PairError, match="no draft"):
            Pair(PairSpec.of(smollm2[0], share_kv="on"))

    def test_without_flash_attention_there_is_a_reason(self, smollm2: tuple[Path, Path]) -> None:
        with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=512, flash_attn="off"))) as opened:
            assert opened.kv.reason == "flash attention is off"

    def test_a_draft_with_a_smaller_context(self, smollm2: tuple[Path, Path]) -> None:
        """A draft context smaller than the target's, on real caches.

        https://github.com/ggml-org/llama.cpp/issues/22554
        """
        params = EngineParams(n_ctx=512)
        with Pair(PairSpec.of(*smollm2, params, draft_params=EngineParams(n_ctx=64))) as opened:
            endless = SamplingParams(temperature=0, logit_bias=ENDLESS)
            text = opened.generate(PROMPTS[2], endless, fixed(n_predict=60))
            text.read()
            assert len(text.tokens) == 60
            assert text.summary.n_accepted > 0
            assert all(r.n_draft == 0 for r in text.rounds if r.n_context > 64)


@pytest.fixture(scope="module")
def repeated(source_file: Path) -> list[int]:
    """The tokens of the target alone."""
    with Pair(PairSpec.of(source_file, params=TestRepetitions.PARAMS)) as target:
        text = target.generate(TestRepetitions.PROMPT, TestRepetitions.GREEDY, fixed(n_predict=60))
        text.read()
        return text.tokens


class TestRepetitions:
    """n-grams and the model together, on real caches."""

    PROMPT = "Repeat this list three times: " + "red, green, blue, yellow, black, white. " * 3
    GREEDY = SamplingParams(temperature=0, logit_bias=ENDLESS)
    PARAMS = EngineParams(n_ctx=1024, n_threads=1, cache_type_k="q8_0", cache_type_v="q8_0")

    @pytest.mark.parametrize("share_kv", ["on", "off"])
    def test_same_text_as_the_target_alone(
        self,
        smollm2: tuple[Path, Path],
        source_file: Path,
        share_kv: str,
        repeated: list[int],
    ) -> None:
        spec = PairSpec.of(source_file, smollm2[1], self.PARAMS, share_kv=share_kv)
        with Pair(spec) as opened:
            text = opened.generate(self.PROMPT, self.GREEDY, fixed(n_predict=60, drafter="hybrid"))
            text.read()
            assert text.tokens == repeated
            assert text.check() == Check(same=True, by_token=True, fork=None, margin=None, noise=0)
            accepted = {s: n["n_accepted"] for s, n in text.summary.sources.items()}
            assert accepted["ngram"] > 10


def test_a_closed_pair_says_so(source_file: Path) -> None:
    opened = Pair(PairSpec.of(source_file))
    opened.close()
    opened.close()
    with pytest.raises(EngineError, match="closed"):
        opened.generate("hello").read()
