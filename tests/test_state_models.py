"""Tiny models with a recurrent state, in llama.cpp: ways back, copies, texts one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from zoo import ZOO

from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import DecodeParams, FinishReason, Round, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import EngineError, PairError
from qdraft.llama import model as model_module
from qdraft.llama.context import LlamaContext
from qdraft.llama.model import LlamaModel
from qdraft.llama.params import EngineParams
from qdraft.llama.spec import PairSpec
from qdraft.llama.state_proof import NOISE, difference
from qdraft.llama.state_sequence import StateSequence
from qdraft.session.generation import Generation
from qdraft.session.pair import Pair
from qdraft.testing import FakeClock, ScriptedDrafter

PARAMS = EngineParams(n_ctx=768, n_threads=1, n_rs_seq=3)
NO_END = {1: -np.inf}
GREEDY = SamplingParams(temperature=0, logit_bias=NO_END)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, logit_bias=NO_END)
PROMPT = [2, 9, 4]
# One with each way back: states of a decode, and checkpoints only, with KV cells and without.
FEW = ("lfm2", "qwen35", "mamba2", "granite-hybrid")


@pytest.fixture(autouse=True)
def _no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    # The trial in a child process has tests of its own.
    monkeypatch.setattr(model_module, "require_loadable", lambda _path: None)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("states")

    def make(name: str, seed: int = 1) -> Path:
        path = folder / f"{name}-{seed}.gguf"
        return path if path.exists() else ZOO[name].write(path, seed=seed)

    return make


@pytest.fixture
def open_context(file_of: Callable[..., Path]) -> Iterator[Callable[[str], LlamaContext]]:
    models: list[LlamaModel] = []
    contexts: list[LlamaContext] = []

    def opened(name: str, params: EngineParams = PARAMS) -> LlamaContext:
        models.append(LlamaModel(file_of(name), params))
        contexts.append(LlamaContext(models[-1], params))
        return contexts[-1]

    yield opened
    for each in [*contexts, *models]:
        each.close()


def fixed(n: int, n_draft: int, **rest: object) -> DecodeParams:
    return DecodeParams(
        n_predict=n,
        draft_policy="fixed",
        n_draft=n_draft,
        seed=3,
        **rest,  # type: ignore[arg-type]
    )


def rows_alone(sequence: StateSequence, tokens: Sequence[int]) -> np.ndarray:
    return np.array([sequence.eval([token], 1)[0].copy() for token in tokens])


@pytest.mark.parametrize("name", ZOO)
def test_greedy_text_is_the_targets_whatever_is_rejected(
    name: str, open_context: Callable[[str], LlamaContext]
) -> None:
    """Drafts that are right up to any place, at lengths beyond what a decode can take back."""
    context = open_context(name)
    assert context.n_back == (3 if ZOO[name].rolls_back else 0)
    alone = list(decode(context, lambda text: []))
    tokens = [token for r in alone for token in r.tokens]
    full = [*PROMPT, *tokens]

    def half_right(text: Sequence[int]) -> list[int]:
        n = len(text)
        n_right = n * 31 // 8 % 7
        return [*full[n : n + n_right], *[(full[n - 1] + 1) % 26 + 2] * (6 - n_right)]

    rounds = list(decode(context, half_right))
    assert [token for r in rounds for token in r.tokens] == tokens
    assert len({r.n_accepted for r in rounds if r.n_draft == 6}) > 4
    read_again = {r.n_reread for r in rounds if r.n_draft}
    assert max(read_again) <= 16
    if context.n_back == 0:
        assert len(read_again) > 2


def decode(context: LlamaContext, script: Callable[[Sequence[int]], list[int]]) -> Iterator[Round]:
    sequence = context.sequence()
    yield from Decoding(
        sequence,
        ScriptedDrafter(script),
        PROMPT,
        Sampler(GREEDY, context.vocab.n_tokens),
        FixedSchedule(6, plain_every=0),
        SeededRng(1),
        FakeClock(),
        n_predict=50,
    )
    sequence.close()


@pytest.mark.parametrize(
    ("name", "share_kv", "n"),
    [*((name, "on", 60) for name in ZOO), *((name, "off", 500) for name in ("qwen35", "mamba2"))],
)
def test_the_self_pair_accepts_nearly_all(
    name: str, share_kv: str, n: int, file_of: Callable[..., Path]
) -> None:
    path = file_of(name)
    if name == "deepseek4" and share_kv == "on":
        with pytest.raises(PairError, match="copies deepseek4 cells whole only"):
            Pair(PairSpec.of(path, path, PARAMS, share_kv="on"))
        return
    with Pair(PairSpec.of(path, path, PARAMS, share_kv=share_kv)) as pair:
        assert pair.kv.shared == (share_kv == "on")
        text = pair.generate("abc", PLAIN, fixed(n, 4), raw=True)
        text.read()
    assert text.summary.n_drafted > n / 2
    assert (text.summary.alpha or 0) >= 0.98


@pytest.mark.parametrize("share_kv", ["on", "off"])
@pytest.mark.parametrize("name", ["lfm2", "granite-hybrid"])
def test_another_models_drafts_change_no_text(
    name: str, share_kv: str, file_of: Callable[..., Path]
) -> None:
    with Pair(PairSpec.of(file_of(name), file_of(name, 2), PARAMS, share_kv=share_kv)) as pair:
        alone = pair.generate("abc", GREEDY, fixed(40, 0), raw=True)
        alone.read()
        for drafter, n_draft in (("model", 2), ("model", 7), ("hybrid", 4), ("ngram", 4)):
            text = pair.generate("abc", GREEDY, fixed(40, n_draft, drafter=drafter), raw=True)
            text.read()
            assert text.tokens == alone.tokens
            assert drafter != "model" or (text.summary.alpha or 0) < 0.5
        assert text.check().same


class TestSequence:
    """The ways back of one text, compared with the same tokens one by one."""

    TEXT: ClassVar = [int(token) for token in np.random.default_rng(1).integers(2, 28, 90)]

    @pytest.mark.parametrize("name", FEW)
    def test_back_to_a_checkpoint_many_times(
        self, name: str, open_context: Callable[[str], LlamaContext]
    ) -> None:
        context = open_context(name)
        expected = rows_alone(context.sequence(), self.TEXT)  # beside the other text
        sequence = context.sequence()
        sequence.eval(self.TEXT[:40], 0)
        sequence.checkpoint()
        for n in (1, 5, 9):
            sequence.eval([5] * n, 1)
            sequence.truncate(40)
            assert list(sequence.tokens) == self.TEXT[:40]
        sequence.eval(self.TEXT[40:42], 1)
        sequence.truncate(41)
        row = sequence.eval(self.TEXT[sequence.n_past : 50], 1)[0]
        assert difference(row, expected[49]) < NOISE

    def test_a_decode_is_taken_back_once_and_no_further_than_it_reaches(
        self, open_context: Callable[[str], LlamaContext]
    ) -> None:
        sequence = open_context("lfm2").sequence()
        expected = rows_alone(sequence, self.TEXT)
        sequence.truncate(0)
        sequence.eval(self.TEXT[:20], 0)
        sequence.checkpoint()
        sequence.eval(self.TEXT[20:21], 1)
        sequence.eval([*self.TEXT[21:23], 5], 1)
        sequence.truncate(23)
        assert sequence.n_past == 23
        sequence.truncate(22)  # a second time: llama.cpp would take a wrong state
        assert sequence.n_past == 20
        sequence.eval(self.TEXT[20:30], 1)
        sequence.eval([self.TEXT[30]], 1)
        sequence.truncate(29)  # before the last decode
        assert sequence.n_past == 20
        row = sequence.eval(self.TEXT[20:40], 1)[0]
        assert difference(row, expected[39]) < NOISE

    def test_tokens_before_a_checkpoint_are_not_taken_back_under_it(
        self, open_context: Callable[[str], LlamaContext]
    ) -> None:
        sequence = open_context("lfm2").sequence()
        expected = rows_alone(sequence, self.TEXT[:30])
        sequence.truncate(0)
        sequence.eval([*self.TEXT[:19], 5], 1)
        sequence.checkpoint()
        sequence.truncate(19)  # the last decode holds it, but the checkpoint shares its state
        sequence.eval(self.TEXT[sequence.n_past : 20], 1)
        sequence.eval([5, 5, 5, 5, 5, 5], 1)
        sequence.truncate(20)  # the checkpoint is of another text
        row = sequence.eval(self.TEXT[sequence.n_past : 30], 1)[0]
        assert difference(row, expected[29]) < NOISE

    def test_a_checkpoint_after_a_rollback_is_of_the_tokens_that_stayed(
        self, open_context: Callable[[str], LlamaContext]
    ) -> None:
        sequence = open_context("qwen35").sequence()
        expected = rows_alone(sequence, self.TEXT[:30])
        sequence.truncate(0)
        sequence.eval([*self.TEXT[:20], 5, 5], 0)
        sequence.truncate(20)
        assert sequence.n_past == 20
        sequence.checkpoint()
        sequence.eval([7, 7, 7, 7, 7, 7], 1)
        sequence.truncate(20)
        assert sequence.n_past == 20
        assert difference(sequence.eval(self.TEXT[20:30], 1)[0], expected[29]) < NOISE

    @pytest.mark.parametrize("name", FEW)
    def test_a_long_prompt_over_several_batches(
        self, name: str, open_context: Callable[..., LlamaContext]
    ) -> None:
        small = EngineParams(n_ctx=256, n_threads=1, n_batch=64, n_ubatch=8, n_rs_seq=3)
        sequence = open_context(name, small).sequence()
        expected = rows_alone(sequence, self.TEXT)
        sequence.truncate(0)
        sequence.eval([*self.TEXT[:80], 5, 5], 3)
        sequence.truncate(80)
        row = sequence.eval(self.TEXT[sequence.n_past :], 1)[0]
        assert difference(row, expected[-1]) < NOISE

    @pytest.mark.parametrize("name", FEW)
    def test_a_decode_that_fails_goes_back_to_what_is_sure(
        self,
        name: str,
        open_context: Callable[[str], LlamaContext],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """As when Ctrl-C ends a slow decode: the state may have read a part of its tokens."""
        context = open_context(name)
        sequence = context.sequence()
        expected = rows_alone(sequence, self.TEXT[:30])
        sequence.truncate(0)
        sequence.eval(self.TEXT[:20], 0)
        sequence.checkpoint()
        decode = context.decode

        def broken(*arguments: object) -> None:
            decode(*arguments)  # type: ignore[arg-type]
            raise EngineError("llama_decode returned 2")

        monkeypatch.setattr(context, "decode", broken)
        with pytest.raises(EngineError):
            sequence.eval([6, 6, 6], 1)
        monkeypatch.undo()
        assert list(sequence.tokens) == self.TEXT[:20]
        assert difference(sequence.eval(self.TEXT[20:30], 1)[0], expected[29]) < NOISE

    def test_there_are_few_texts_at_once(self, open_context: Callable[[str], LlamaContext]) -> None:
        context = open_context("lfm2")
        first, second = context.sequence(), context.sequence()
        assert {first.checkpoint_id, second.checkpoint_id} == {2, 3}
        with pytest.raises(EngineError, match="holds 2 sequences already"):
            context.sequence()
        for sequence in (first, second):
            sequence.eval(self.TEXT[:9], 0)
            sequence.checkpoint()
        first.close()
        again = context.sequence()
        assert again.n_past == 0
        row = again.eval(self.TEXT[:10], 1)[0].copy()
        assert difference(second.eval(self.TEXT[9:10], 1)[0], row) < NOISE


class TestSession:
    """Texts one after another, which go back to places and read little again."""

    LONG: ClassVar = [int(token) for token in np.random.default_rng(2).integers(2, 28, 120)]

    @staticmethod
    def turn(session: object, tokens: Sequence[int], n_draft: int = 3) -> Generation:
        text = session.generate(tokens, GREEDY, fixed(24, n_draft))  # type: ignore[attr-defined]
        text.read()
        return text

    @pytest.mark.parametrize("share_kv", ["on", "off"])
    @pytest.mark.parametrize("name", ["qwen35", "mamba2"])
    def test_a_turn_a_retry_and_another_end(
        self, name: str, share_kv: str, file_of: Callable[..., Path]
    ) -> None:
        with Pair(PairSpec.of(file_of(name), file_of(name, 2), PARAMS, share_kv=share_kv)) as pair:
            with pair.session() as session:
                first = self.turn(session, self.LONG)
                longer = [*self.LONG, *first.tokens, 7, 8, 9]
                second = self.turn(session, longer)
                retried = self.turn(session, longer)
                other = [*self.LONG[:-2], 3, 4, 5]
                changed = self.turn(session, other)
            assert first.n_reused.target == 0
            assert second.n_reused.target >= len(longer) - 3 - 12
            # The second turn read few tokens: the place is where it began, or the checkpoint after.
            assert retried.n_reused.target >= second.n_reused.target
            assert changed.n_reused.target == len(self.LONG) - 16
            for text, prompt in ((first, self.LONG), (second, longer), (changed, other)):
                assert text.tokens == self.alone(pair, prompt)
            assert retried.tokens == second.tokens

    def alone(self, pair: Pair, prompt: Sequence[int]) -> list[int]:
        with pair.session() as session:
            return self.turn(session, prompt, n_draft=0).tokens

    @pytest.mark.parametrize("name", ["lfm2", "mamba2"])
    def test_a_stop_string_within_a_block(self, name: str, file_of: Callable[..., Path]) -> None:
        """The text ends in the middle of a draft, and the next one goes on from there."""
        path = file_of(name)
        with Pair(PairSpec.of(path, path, PARAMS)) as pair, pair.session() as session:
            whole = self.turn(session, self.LONG, n_draft=0)
            stop = "".join(pair.vocab.piece(t).decode() for t in whole.tokens[9:11])
            text = session.generate(self.LONG, GREEDY, fixed(24, 7, stop=(stop,)))
            text.read()
            assert text.finish_reason is FinishReason.STOP_STRING
            assert whole.text.startswith(text.text + stop)
            goes_on = [*self.LONG, *text.tokens]
            n = len(whole.tokens) - len(text.tokens)
            rest = session.generate(goes_on, GREEDY, fixed(n, 7))
            rest.read()
            assert [*text.tokens, *rest.tokens] == whole.tokens

    def test_texts_take_turns(self, file_of: Callable[..., Path]) -> None:
        path = file_of("lfm2")
        with Pair(PairSpec.of(path, file_of("lfm2", 2), PARAMS)) as pair:
            texts = [pair.generate(p, GREEDY, fixed(30, 5), raw=True) for p in ("abc", "xyz")]
            for _ in range(30):
                for text in texts:
                    text.step()
            assert all(text.finish_reason is FinishReason.LENGTH for text in texts)
            for text in texts:
                with pair.session() as session:
                    again = session.generate(list(text.prompt), GREEDY, fixed(30, 0))
                    again.read()
                assert again.tokens == text.tokens


def test_a_state_that_does_not_come_back_is_refused_by_name(
    file_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: what is cut is noted, and the state stays where it is."""

    def forget(self: StateSequence, n_past: int) -> None:
        if n_past:
            del self._tokens[n_past:]
        else:
            self._return_to_checkpoint(0)

    monkeypatch.setattr(StateSequence, "truncate", forget)
    path = file_of("mamba2")
    with pytest.raises(PairError, match=r"mamba2-1.gguf cannot verify drafts") as caught:
        Pair(PairSpec.of(path, path, PARAMS))
    assert "--no-draft" in (caught.value.hint or "")
    with Pair(PairSpec.of(path, None, PARAMS)) as pair:
        assert not pair.can_draft
        text = pair.generate("abc", GREEDY, DecodeParams(n_predict=8, n_draft=0), raw=True)
        text.read()
        assert len(text.tokens) == 8


def test_a_copy_of_another_state_is_not_shared(
    file_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a state that was rolled back travels as it was before."""
    monkeypatch.setattr(StateSequence, "is_rolled_back", False)
    path = file_of("lfm2")
    with pytest.raises(PairError, match="a copied state differs from the target's"):
        Pair(PairSpec.of(path, path, PARAMS, share_kv="on"))
