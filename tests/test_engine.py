"""Probing, quantizing and pairing on real files."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from qdraft.cli.opening import describe_load
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import EngineError, PairError, UsageError
from qdraft.host import cpu_id, default_threads
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.llama.native import build_id, lib, library_version
from qdraft.llama.params import EngineParams
from qdraft.llama.quantize import Recipe, quantize
from qdraft.llama.repack_probe import ask, run_child
from qdraft.llama.spec import PairSpec
from qdraft.llama.vocab import LlamaVocab, require_same_vocab
from qdraft.session.pair import Pair

pytestmark = pytest.mark.real


class TestExtraBuffers:
    """A machine on which tile instructions kill the process works out of the box."""

    @pytest.mark.parametrize("status", [-4, -11, 0xC000001D, 132])
    def test_a_child_that_dies_means_no_and_is_remembered(
        self, tmp_path: Path, status: int
    ) -> None:
        store, asked = tmp_path / "kept.json", []

        def run(command: Sequence[str]) -> int:
            asked.append(command)
            return status

        assert ask(store, "build and cpu", run) is False
        assert ask(store, "build and cpu", run) is False
        assert len(asked) == 1
        ask(store, "another cpu", run)
        assert len(asked) == 2
        assert json.loads(store.read_text()) == {"build and cpu": False, "another cpu": False}

    def test_a_real_sigill(self, tmp_path: Path) -> None:
        if sys.platform == "win32":
            pytest.skip("signals of this kind are POSIX")
        die = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
        run = lambda command: run_child([sys.executable, "-c", die])  # noqa: E731
        assert ask(tmp_path / "kept.json", "key", run) is False
        assert json.loads((tmp_path / "kept.json").read_text()) == {"key": False}

    def test_an_ordinary_failure_means_no_for_now(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert ask(tmp_path / "kept.json", "key", lambda command: 1) is False
        assert not (tmp_path / "kept.json").exists()
        assert "stay off" in caplog.text

    def test_the_child_decodes_here_or_dies_of_a_signal(self, tmp_path: Path) -> None:
        """The tiny model loads and decodes; only an illegal instruction may stop it."""
        statuses = []

        def run(command: Sequence[str]) -> int:
            statuses.append(run_child(command))
            return statuses[-1]

        assert ask(tmp_path / "kept.json", "key", run) is (statuses[0] == 0)
        assert statuses[0] <= 0

    def test_a_damaged_store_is_replaced(self, tmp_path: Path) -> None:
        store = tmp_path / "kept.json"
        store.write_text("{")
        assert ask(store, "key", lambda command: 0) is True
        assert json.loads(store.read_text()) == {"key": True}


def test_names_of_build_and_cpu() -> None:
    assert build_id().startswith(library_version())
    assert build_id() == build_id()
    assert cpu_id()
    assert default_threads() >= 1


class TestQuantize:
    def test_types_and_fallbacks_are_told(self, source_file: Path, tmp_path: Path) -> None:
        """A file called Q2_K may hold no Q2_K tensor: quantize says what it holds.

        https://github.com/ggml-org/llama.cpp/issues/6614
        """
        steps: list[tuple[float, float]] = []
        made = quantize(
            source_file,
            tmp_path / "q2.gguf",
            Recipe("Q2_K"),
            threads=2,
            progress=lambda what, *s: steps.append(s),
        )
        assert steps[-1] == (272, 272)
        assert len(steps) == 272
        assert made.n_fallback == 180
        assert made.types["Q4_0"] == 180
        assert "Q2_K" not in made.types
        assert made.n_bytes == made.path.stat().st_size

    def test_interrupt_leaves_nothing(self, source_file: Path, tmp_path: Path) -> None:
        def stop(what: str, done: float, of: float) -> None:
            if done > 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            quantize(source_file, tmp_path / "out.gguf", Recipe("F16"), threads=2, progress=stop)
        assert list(tmp_path.iterdir()) == []

    def test_failure_leaves_nothing_and_gives_the_reason(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(EngineError, match=r"cannot quantize .*bad\.gguf: \S+"):
            quantize(bad, tmp_path / "out.gguf", Recipe("F16"), threads=1)
        assert list(tmp_path.iterdir()) == [bad]

    def test_unknown_type_names_the_known_ones(self, source_file: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="Q9_K") as caught:
            quantize(source_file, tmp_path / "out.gguf", Recipe("Q9_K"), threads=1)
        assert caught.value.hint is not None
        assert "Q2_K" in caught.value.hint


def tiny_model(
    path: Path, tokens: Sequence[str], unused: Sequence[int] = (), eos: int = 1
) -> LlamaModel:
    return LlamaModel(tiny.zeros(path, tokens, unused, eos), EngineParams())


class TestSameVocabulary:
    """An error names the first token that differs and both texts; padding is not a difference.

    https://github.com/ggml-org/llama.cpp/pull/3812
    https://github.com/vllm-project/vllm/issues/7252
    """

    tokens = ("<s>", "</s>", "a", "b", "ab")

    def test_same(self, tmp_path: Path) -> None:
        first = tiny_model(tmp_path / "1.gguf", self.tokens)
        require_same_vocab(first.vocab, tiny_model(tmp_path / "2.gguf", self.tokens).vocab)

    def test_first_difference(self, tmp_path: Path) -> None:
        first = tiny_model(tmp_path / "1.gguf", self.tokens)
        second = tiny_model(tmp_path / "2.gguf", ("<s>", "</s>", "a", "X", "Y"))
        with pytest.raises(PairError, match="token 3 is 'b' in the target, 'X' in the draft"):
            require_same_vocab(first.vocab, second.vocab)

    def test_padding_may_differ_but_real_tokens_may_not(self, tmp_path: Path) -> None:
        first = tiny_model(tmp_path / "1.gguf", self.tokens)
        padded = tiny_model(tmp_path / "2.gguf", (*self.tokens, "[PAD5]", "[PAD6]"), unused=[5, 6])
        require_same_vocab(first.vocab, padded.vocab)
        require_same_vocab(padded.vocab, first.vocab)
        longer = tiny_model(tmp_path / "3.gguf", (*self.tokens, "new"))
        with pytest.raises(PairError, match="token 5, 'new', is only in the draft"):
            require_same_vocab(first.vocab, longer.vocab)


def test_equal_hashes_of_the_tokens_spare_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start asked llama.cpp for every token of both, 300,000 of them for some models."""
    asked: list[LlamaVocab] = []
    monkeypatch.setattr(LlamaVocab, "texts", lambda vocab: asked.append(vocab) or [])
    tokens = TestSameVocabulary.tokens
    first = tiny.zeros(tmp_path / "1.gguf", tokens)
    same = tiny.zeros(tmp_path / "2.gguf", tokens)
    with Pair(PairSpec.of(first, same, share_kv="off")):
        assert not asked
    tiny.zeros(same, tokens, eos=2)
    with Pair(PairSpec.of(first, same, share_kv="off")):
        assert "eos is 1 in the target, 2 in the draft" in caplog.text
        assert not asked
    tiny.zeros(same, [*tokens[:-1], "xy"])
    with Pair(PairSpec.of(first, same, share_kv="off")):
        assert len(asked) == 2


class TestRecurrent:
    """A recurrent model runs alone, twice, and as a pair.

    https://github.com/ggml-org/llama.cpp/issues/20039
    https://github.com/abetlen/llama-cpp-python/issues/2140
    """

    def test_alone(self, tmp_path: Path) -> None:
        greedy, few = SamplingParams(temperature=0), DecodeParams(n_predict=8)
        with Pair(PairSpec.of(tiny.mamba(tmp_path / "mamba.gguf"))) as alone:
            texts = [alone.generate("abc", greedy, few) for _ in range(2)]
            assert texts[0].read() == texts[1].read()
            assert texts[0].tokens == texts[1].tokens
            assert len(texts[0].tokens) in range(1, 9)


class TestDraftLimits:
    """Settings of the draft that are less than the target's are said, and change no text.

    https://github.com/ggml-org/llama.cpp/issues/11200
    """

    @pytest.mark.parametrize("share_kv", ["on", "off"])
    def test_drafts_end_where_the_draft_is_full(
        self, tmp_path: Path, share_kv: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tiny.mixture(tmp_path / "m.gguf")
        greedy = SamplingParams(temperature=0, logit_bias={1: -np.inf})
        params = EngineParams(n_ctx=256, n_threads=1)
        small = replace(params, n_ctx=64)
        fixed = DecodeParams(n_predict=60, draft_policy="fixed", n_draft=4)
        with Pair(PairSpec.of(path, path, params, small, share_kv=share_kv)) as pair:
            n_ctx = pair.contexts.draft.n_ctx if pair.contexts.draft else 0
            assert f"context has {n_ctx} tokens and the target's 256: longer texts" in caplog.text
            for prompt in ("a", "ab" * (n_ctx // 2 + 8)):  # becomes full, and is full
                texts = [
                    pair.generate(prompt * 2, greedy, replace(fixed, **how), raw=True)
                    for how in ({}, {"n_draft": 0})
                ]
                assert texts[0].read() == texts[1].read()
                assert len(texts[0].tokens) == 60
                full = [each.n_draft for each in texts[0].rounds if each.n_context > n_ctx]
                assert full.count(0) == len(full)
        assert f"the draft's context of {n_ctx} tokens is full" in caplog.text

    def test_a_cache_of_other_types_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tiny.mixture(tmp_path / "m.gguf")
        params = EngineParams(n_ctx=64, n_threads=1)
        with Pair(PairSpec.of(path, path, params, replace(params, cache_type_k="bf16"))) as pair:
            assert not pair.kv.shared
        assert "the draft's KV cache is bf16 and f16 and the target's f16, so they" in caplog.text
        caplog.clear()
        with Pair(PairSpec.of(path, path, params)):
            assert "KV cache" not in caplog.text


class TestWindows:
    """A sliding window loses cells that a rollback needs, unless the cache is whole.

    https://github.com/ggml-org/llama.cpp/issues/13963
    """

    PROMPT = "abcdefghijklmnopqrstuvwxyz" * 4  # beyond the window of 32

    @pytest.mark.parametrize("share_kv", ["on", "off"])
    def test_rejected_drafts_leave_no_trace(self, tmp_path: Path, share_kv: str) -> None:
        target = tiny.windowed(tmp_path / "target.gguf")
        other = tiny.windowed(tmp_path / "other.gguf", seed=2)  # nearly always wrong
        greedy = SamplingParams(temperature=0, logit_bias={1: -np.inf})
        params = EngineParams(n_ctx=512, n_threads=1)
        with Pair(PairSpec.of(target, other, params, share_kv=share_kv)) as pair:
            texts = [
                pair.generate(self.PROMPT, greedy, DecodeParams(n_predict=120, **how), raw=True)
                for how in ({"draft_policy": "fixed", "n_draft": 4}, {"n_draft": 0})
            ]
            for text in texts:
                text.read()
            assert texts[0].summary.n_accepted < texts[0].summary.n_tested / 2
            # Rows of a batch round differently from rows alone: the texts are one up to a place
            # at which that explains a fork, if there is one.
            check = texts[0].check()
            assert check.explained
            n_same = 120 if check.fork is None else check.fork
            assert n_same > 20
            assert texts[0].tokens[:n_same] == texts[1].tokens[:n_same]

    @pytest.mark.parametrize("share_kv", ["on", "off"])
    def test_a_file_with_itself(self, tmp_path: Path, share_kv: str) -> None:
        path = tiny.windowed(tmp_path / "model.gguf")
        plain = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, logit_bias={1: -np.inf})
        fixed = DecodeParams(n_predict=200, draft_policy="fixed", n_draft=4, seed=1)
        params = EngineParams(n_ctx=512, n_threads=1)
        with Pair(PairSpec.of(path, path, params, share_kv=share_kv)) as pair:
            text = pair.generate(self.PROMPT, plain, fixed, raw=True)
            text.read()
            assert text.summary.alpha is not None
            assert text.summary.alpha > 0.98


def test_a_mixture_of_experts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mixtures of experts gain little from a draft, and qdraft warns of it.

    https://github.com/JustVugg/colibri/issues/8
    """
    path = tiny.mixture(tmp_path / "moe.gguf")
    with Pair(PairSpec.of(path, path)) as pair:
        assert pair.contexts.target.n_ctx == 256
    assert "moe.gguf is a mixture of experts (2 of 4 a token)" in caplog.text


@pytest.mark.parametrize(("load", "said"), [(0.5, None), (7.9, None), (9.5, "9.5 on 4 cores")])
def test_more_load_than_cores_is_said(
    monkeypatch: pytest.MonkeyPatch, load: float, said: str | None
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    words = describe_load()
    assert (said is None) == (words is None)
    assert said is None or said in (words or "")


def test_an_interrupt_waits_for_the_decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in the middle it would be lost in a callback, or leave the cache uncounted."""
    model = LlamaModel(tiny.mixture(tmp_path / "m.gguf"), EngineParams())
    context = LlamaContext(model, EngineParams(n_ctx=64))
    engine = context.sequence()
    library = lib()
    decode = library.llama_decode

    def interrupted(*args: object) -> int:
        signal.raise_signal(signal.SIGINT)
        return int(decode(*args))

    monkeypatch.setattr(library, "llama_decode", interrupted)
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        engine.eval([2, 3, 4], 1)
        assert heard == [signal.SIGINT]  # the handler of the caller, whatever it is
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        engine.eval([5], 1)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        engine.eval([6, 7], 1)
    assert engine.n_past == 6
    context.close()
    model.close()
