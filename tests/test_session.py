"""Sessions and texts that take turns: what they reuse, and that each is what it is alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny
from fakes import engine, vocab

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

from qdraft import DecodeParams, EngineParams, FinishReason, Pair, PairSpec, SamplingParams
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import Round
from qdraft.decoding.sampling import History, Processor, Row
from qdraft.errors import ContextError, EngineError, UsageError
from qdraft.session.generation import Generation
from qdraft.session.pair import Sequences
from qdraft.session.session import Session
from qdraft.session.threads import Threads
from qdraft.testing import FakeKvCopy

GREEDY = SamplingParams(temperature=0, logit_bias={1: -np.inf})
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, logit_bias={1: -np.inf})
PARAMS = EngineParams(n_ctx=512, n_threads=1)


def fixed(n_predict: int = 12, n_draft: int = 4, seed: int = 1) -> DecodeParams:
    return DecodeParams(n_predict=n_predict, draft_policy="fixed", n_draft=n_draft, seed=seed)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small model, and another of the same shape that is nearly always wrong about it."""
    folder = tmp_path_factory.mktemp("session")
    return tiny.windowed(folder / "target.gguf"), tiny.windowed(folder / "other.gguf", seed=2)


@pytest.fixture(params=["on", "off"])
def pair(request: pytest.FixtureRequest, files: tuple[Path, Path]) -> Iterator[Pair]:
    with Pair(PairSpec.of(*files, PARAMS, share_kv=request.param)) as opened:
        yield opened


def user(turn: int, n: int = 5) -> list[int]:
    """The tokens that a user adds in a turn."""
    return [2 + (7 * turn + 3 * i) % 26 for i in range(n)]


class CountedTokens:
    """Counts the tokens that a pair's contexts decode."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = [0 for _ in pair.contexts]
        for i, context in enumerate(pair.contexts):
            monkeypatch.setattr(context, "decode", self._counting(i, context.decode))

    def _counting(self, i: int, decode: object) -> object:
        def counting(id: int, start: int, tokens: Sequence[int], *more: object) -> None:
            self.n[i] += len(tokens)
            decode(id, start, tokens, *more)  # type: ignore[operator]

        return counting

    def take(self) -> list[int]:
        taken, self.n = self.n, [0 for _ in self.n]
        return taken


class TestSession:
    @pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "temperature 1"])
    def test_a_turn_reads_only_what_is_new_and_writes_what_a_fresh_pair_does(
        self,
        pair: Pair,
        files: tuple[Path, Path],
        sampling: SamplingParams,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        counted = CountedTokens(pair, monkeypatch)
        tokens: list[int] = [0]
        with pair.session() as session:
            for turn in range(6):
                n_before = len(tokens)
                tokens += user(turn)
                text = session.generate(tokens, sampling, fixed(seed=turn))
                text.read()
                by_target, by_draft = counted.take()
                # The last token of the text before was never decoded: it had no successor yet.
                n_known = n_before - 1 if turn else 0
                assert text.n_reused.target == n_known
                assert text.rounds[0].n_prompt == len(tokens) - n_known
                n_rows = sum(round.n_draft + 1 for round in text.rounds[1:])
                assert by_target == len(tokens) - n_known + n_rows
                n_drafted = sum(round.draft.n_rows for round in text.rounds)
                n_read = 0 if pair.kv.shared else len(tokens) - n_known
                # Without shared cells the draft also reads what it did not draft itself.
                n_own = 0 if pair.kv.shared else 2 * len(text.rounds)
                assert by_draft <= n_read + n_drafted + n_own
                with Pair(pair.spec) as fresh:
                    again = fresh.session().generate(tokens, sampling, fixed(seed=turn))
                    again.read()
                assert again.n_reused.target == 0
                assert text.tokens == again.tokens
                tokens += text.tokens

    def test_another_text_keeps_only_the_common_prefix(self, pair: Pair) -> None:
        with pair.session() as session:
            first = session.generate([0, *user(1, 20)], GREEDY, fixed())
            first.read()
            prompt = [0, *user(1, 9), *user(2, 9)]
            second = session.generate(prompt, GREEDY, fixed())
            second.read()
            assert second.n_reused.target == 10
            assert second.n_reused.draft in range(11)
            fresh = pair.session().generate(prompt, GREEDY, fixed())
            fresh.read()
            assert second.tokens == fresh.tokens

    def test_a_file_with_itself_stays_in_step_for_twenty_turns(
        self, files: tuple[Path, Path]
    ) -> None:
        for share_kv in ("on", "off"):
            spec = PairSpec.of(files[0], files[0], PARAMS, share_kv=share_kv)
            with Pair(spec) as same, same.session() as session:
                tokens: list[int] = [0]
                accepted, tested = 0, 0
                for turn in range(20):
                    tokens += user(turn, 4)
                    text = session.generate(tokens, PLAIN, fixed(16, seed=turn))
                    text.read()
                    tokens += text.tokens
                    accepted += text.summary.n_accepted
                    tested += text.summary.n_tested
                    assert accepted > 0.97 * tested, (share_kv, turn)
                assert tested >= 200

    def test_a_session_makes_one_text_at_a_time(self, pair: Pair) -> None:
        with pair.session() as session:
            first = session.generate(user(1), GREEDY, fixed())
            first.step()
            with pytest.raises(EngineError, match="in the middle of a text"):
                session.generate(user(2), GREEDY, fixed()).read()
            rest = first.read()
            assert rest
            assert session.generate(user(2), GREEDY, fixed()).read()

    def test_a_prompt_needs_tokens(self, pair: Pair) -> None:
        with pair.session() as session, pytest.raises(UsageError, match="the prompt has no tokens"):
            session.generate([])

    def test_a_text_that_does_not_fit_leaves_the_session_as_it_is(self, pair: Pair) -> None:
        with pair.session() as session:
            first = session.generate(user(1, 20), GREEDY, fixed())
            first.read()
            with pytest.raises(ContextError, match="the prompt has 600 tokens"):
                session.generate([2] * 600, GREEDY, fixed()).read()
            again = session.generate([*user(1, 20), *first.tokens], GREEDY, fixed())
            again.read()
            assert again.n_reused.target == 20 + len(first.tokens) - 1


def never_twice(row: Row, history: History) -> Row:
    """Forbid the token before, in the text or in the draft."""
    row[history.last(1)] = -np.inf
    return row


def has_twice(tokens: Sequence[int]) -> bool:
    return any(a == b for a, b in pairwise(tokens))


class FakePair:
    """What a session asks of a pair, over fake sequences; ``opened`` are all that it has opened."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.vocab = vocab(8)
        self.draft = True
        self.learned = Learned()
        self.opened: list[Sequences] = []
        self.holding: set[Session] = set()
        self.threads = Threads([])

    def open_sequences(self) -> Sequences:
        target, draft = engine(), engine(blend=0.3)
        self.opened.append(Sequences(target, draft, FakeKvCopy(target, draft)))  # type: ignore[arg-type]
        return self.opened[-1]

    def register(self, session: Session) -> None:
        self.holding.add(session)

    def forget(self, session: Session) -> None:
        self.holding.discard(session)

    def require_rollback(self) -> None: ...

    def observe(self, round: Round) -> None: ...

    def save_costs(self) -> None: ...


class TestWithoutAModel:
    """Sessions and their texts on fakes, whose logits are exact: equal means equal."""

    PROMPTS = ([1, 0, 2], [3, 3, 1, 5], [7, 2, 2])
    SAMPLING = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)

    def texts(self, pair: FakePair, *, keep: bool = True) -> list[Generation]:
        return [
            Session(pair, keep=keep).generate(  # type: ignore[arg-type]
                prompt, self.SAMPLING, fixed(30, seed=i)
            )
            for i, prompt in enumerate(self.PROMPTS)
        ]

    def test_texts_that_take_turns_are_what_they_are_alone(self) -> None:
        alone = self.texts(FakePair())
        for text in alone:
            text.read()
        texts = self.texts(FakePair())
        waiting = list(texts)
        while waiting:
            waiting = [text for text in waiting if text.step()]
        assert [text.tokens for text in texts] == [text.tokens for text in alone]
        assert sum(text.summary.n_accepted for text in texts) > 10

    def test_threads_take_turns_too(self) -> None:
        alone = self.texts(FakePair())
        for text in alone:
            text.read()
        texts = self.texts(FakePair())
        threads = [threading.Thread(target=text.read) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert [text.tokens for text in texts] == [text.tokens for text in alone]

    def test_turns_read_what_is_new_once(self) -> None:
        pair = FakePair()
        session = Session(pair)  # type: ignore[arg-type]
        tokens: list[int] = [1]
        for turn in range(5):
            tokens += [turn, 2, turn]
            text = session.generate(tokens, self.SAMPLING, fixed(9, seed=turn))
            text.read()
            again = Session(FakePair()).generate(  # type: ignore[arg-type]
                tokens, self.SAMPLING, fixed(9, seed=turn)
            )
            again.read()
            assert text.tokens == again.tokens
            assert text.n_reused.target == (len(tokens) - 4 if turn else 0)
            tokens += text.tokens
        assert len(pair.opened) == 1
        session.close()
        assert pair.opened[0].target.closed  # type: ignore[attr-defined]
        assert not pair.holding

    def test_a_text_of_its_own_gives_back_what_it_took(self) -> None:
        pair = FakePair()
        whole, cut = self.texts(pair, keep=False)[:2]
        whole.read()
        cut.step()
        cut.close()
        cut.close()
        assert cut.step() == []
        assert all(opened.target.closed for opened in pair.opened)  # type: ignore[attr-defined]
        assert not pair.holding

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_processors_change_both_sides(self, temperature: float) -> None:
        sampling = SamplingParams(temperature, top_k=0, top_p=1, min_p=0)
        session = Session(FakePair())  # type: ignore[arg-type]

        def texts_of(n_draft: int, processors: Sequence[Processor]) -> list[Generation]:
            texts = []
            for seed, prompt in enumerate(self.PROMPTS):
                params = fixed(60, n_draft, seed)
                texts.append(session.generate(prompt, sampling, params, processors=processors))
                texts[-1].read()
            return texts

        def is_obeyed(text: Generation) -> bool:
            whole = [*text.prompt[-1:], *text.tokens]
            n_seen, drafts = 1, []
            for round in text.rounds:
                drafts.append([whole[n_seen - 1], *round.draft.tokens])
                n_seen += len(round.tokens)
            return not has_twice(whole) and not any(map(has_twice, drafts))

        free, masked = texts_of(4, ()), texts_of(4, [never_twice])
        assert not all(is_obeyed(text) for text in free)
        assert all(is_obeyed(text) for text in masked)
        assert sum(text.summary.n_accepted for text in masked) > 10
        if temperature == 0:
            alone = texts_of(0, [never_twice])
            assert [text.tokens for text in masked] == [text.tokens for text in alone]

    def test_a_text_whose_room_is_taken_ends_whole(self) -> None:
        pair = FakePair()
        session = Session(pair)  # type: ignore[arg-type]
        params = replace(fixed(60), stop=("><9",))
        text = session.generate([1, 2, 3], self.SAMPLING, params)
        chunks = text.step() + text.step()
        target = pair.opened[0].target
        target.n_ctx = target.n_past + 1  # type: ignore[misc]
        while more := text.step():
            chunks += more
        assert text.finish_reason is FinishReason.CONTEXT_FULL
        assert len(text.rounds) == 2
        assert len(text.tokens) == text.summary.n_tokens
        assert "".join(chunk.text for chunk in chunks) == text.text
        assert text.text == "".join(f"<{token}>" for token in text.tokens)
        assert not target.closed  # type: ignore[attr-defined]

    def test_an_error_gives_back_what_may_be_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pair = FakePair()
        session = Session(pair)  # type: ignore[arg-type]
        text = session.generate([1, 2, 3], self.SAMPLING, fixed())
        text.step()

        def fails(*args: object) -> None:
            raise EngineError("the server is lost")

        monkeypatch.setattr(pair.opened[0].target, "eval", fails)
        with pytest.raises(EngineError, match="the server is lost"):
            text.step()
        assert text.finish_reason is FinishReason.ERROR
        assert pair.opened[0].target.closed  # type: ignore[attr-defined]
        assert session.generate([1, 2, 3], self.SAMPLING, fixed()).read()
        assert len(pair.opened) == 2


class TestTakingTurns:
    def alone(self, pair: Pair, seeds: Sequence[int]) -> list[list[int]]:
        texts = [pair.session().generate(user(s, 30), PLAIN, fixed(40, seed=s)) for s in seeds]
        for text in texts:
            text.read()
            text.session.close()
        return [text.tokens for text in texts]

    def test_in_one_thread_each_text_is_what_it_is_alone(self, pair: Pair) -> None:
        seeds = (1, 2, 3)
        alone = self.alone(pair, seeds)
        texts = [pair.session().generate(user(s, 30), PLAIN, fixed(40, seed=s)) for s in seeds]
        waiting: list[Generation] = list(texts)
        while waiting:
            waiting = [text for text in waiting if text.step()]
        assert [text.tokens for text in texts] == alone
        assert {text.finish_reason for text in texts} == {FinishReason.LENGTH}

    def test_in_two_threads_each_text_is_what_it_is_alone(self, pair: Pair) -> None:
        seeds = (1, 2)
        alone = self.alone(pair, seeds)
        texts = [pair.session().generate(user(s, 30), PLAIN, fixed(40, seed=s)) for s in seeds]
        threads = [threading.Thread(target=text.read) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert [text.tokens for text in texts] == alone

    def test_a_text_that_is_closed_gives_its_cells_back_at_once(self, pair: Pair) -> None:
        long = pair.session().generate(user(1, 400), GREEDY, fixed(60))
        long.step()
        with pytest.raises(ContextError, match="the prompt has 300 tokens, but the context holds"):
            pair.session().generate(user(2, 300), GREEDY, fixed()).read()
        long.session.close()
        assert long.finish_reason is FinishReason.INTERRUPTED
        assert long.step() == []
        assert pair.session().generate(user(2, 300), GREEDY, fixed()).read()

    def test_a_text_ends_when_another_has_taken_the_room(self, files: tuple[Path, Path]) -> None:
        for share_kv in ("on", "off"):
            small = EngineParams(n_ctx=256, n_threads=1)
            with Pair(PairSpec.of(*files, small, share_kv=share_kv)) as opened:
                texts = [opened.session().generate(user(i, 30), PLAIN, fixed(-1)) for i in (1, 2)]
                waiting = list(texts)
                while waiting:
                    waiting = [text for text in waiting if text.step()]
                assert {text.finish_reason for text in texts} == {FinishReason.CONTEXT_FULL}
                n_held = sum(len(text.prompt) + len(text.tokens) for text in texts)
                assert (
                    n_held == 256 + 1
                )  # the last token of a text needs no cell until the next round
                with pytest.raises(ContextError, match="the prompt has 5 tokens, but the context"):
                    opened.session().generate(user(3), GREEDY, fixed()).read()

    def test_too_many_at_once_is_said(self, pair: Pair) -> None:
        texts = [pair.session().generate(user(i), GREEDY, fixed()) for i in range(8)]
        for text in texts[:7]:
            text.step()
        with pytest.raises(EngineError, match="holds 7 sequences already"):
            texts[7].step()
        for text in texts:
            text.session.close()
        assert pair.session().generate(user(1), GREEDY, fixed()).read()

    def test_a_check_and_a_probe_in_the_middle_leave_a_text_alone(self, pair: Pair) -> None:
        alone = self.alone(pair, [1])[0]
        text = pair.session().generate(user(1, 30), PLAIN, fixed(40, seed=1))
        text.step()
        text.step()
        assert text.check().explained
        pair.bit_identity(4)
        with pair.sequences() as opened:
            opened.target.eval(user(3), 1)
        text.read()
        assert text.tokens == alone

    def test_closing_the_pair_ends_the_texts_of_other_threads(
        self, files: tuple[Path, Path]
    ) -> None:
        for _ in range(3):
            opened = Pair(PairSpec.of(*files, PARAMS))
            texts = [opened.session().generate(user(i), GREEDY, fixed(400)) for i in range(2)]
            started = [threading.Event() for _ in texts]

            def read(text: Generation, begun: threading.Event) -> None:
                text.step()
                begun.set()
                text.read()

            threads = [
                threading.Thread(target=read, args=both)
                for both in zip(texts, started, strict=True)
            ]
            for thread in threads:
                thread.start()
            for begun in started:
                begun.wait(timeout=60)
            opened.close()
            for thread in threads:
                thread.join(timeout=60)
            assert all(text.step() == [] for text in texts)
            with pytest.raises(EngineError, match="the pair is closed"):
                opened.session().generate(user(1), GREEDY, fixed()).read()

    def test_a_text_that_waits_in_another_thread_does_not_keep_the_pair_open(
        self, files: tuple[Path, Path]
    ) -> None:
        """A thread that takes one chunk of a text and ends holds nothing, as in an executor."""
        opened = Pair(PairSpec.of(*files, PARAMS))
        text = opened.session().generate(user(1), GREEDY, fixed(400))
        chunks = iter(text)
        taken: list[object] = []
        for _ in range(2):  # the second thread may have the number of the first
            thread = threading.Thread(target=lambda: taken.append(next(chunks)))
            thread.start()
            thread.join(timeout=60)
        assert len(taken) == 2
        closing = threading.Thread(target=opened.close, daemon=True)
        closing.start()
        closing.join(timeout=60)
        assert not closing.is_alive()
        assert list(chunks) == []
        assert text.finish_reason is FinishReason.INTERRUPTED
