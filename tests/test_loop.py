"""The loop on a fake engine: counts, caches, limits. Addresses name the public reports of bugs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from fakes import GREEDY, PLAIN, PROMPT, engine, model_drafter, run, table_logits, tokens_of, vocab

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import NoDrafter
from qdraft.decoding.loop import Decoding, TokenReader
from qdraft.decoding.policy.gate import CountingGate
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import Distribution, Draft, FinishReason, Origin, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.verification import verify
from qdraft.errors import ContextError, LogitsError, RollbackError, UsageError
from qdraft.session.check import Check, check
from qdraft.session.text import TextReader
from qdraft.testing import FakeClock, FakeKvCopy, FakeSequence, ScriptedDrafter


def alone(n_predict: int = 32, **kwargs: object) -> list[int]:
    return tokens_of(list(run(engine(), NoDrafter(), n_predict=n_predict, **kwargs)))  # type: ignore[arg-type]


def wrong(context: list[int] | tuple[int, ...]) -> list[int]:
    """Never what the target would say."""
    logits = table_logits(8, 7)
    return [(int(np.argmax(logits(tuple(context)))) + 1) % 8]


def test_always_wrong_drafter_accepts_nothing_and_changes_nothing() -> None:
    """The first draft token of a block is verified too.

    https://github.com/ohdearquant/lattice/issues/243
    """
    rounds = list(run(engine(), ScriptedDrafter(wrong), n_draft=1))
    assert tokens_of(rounds) == alone()
    assert sum(r.n_accepted for r in rounds) == 0
    assert all(r.n_tested == 1 for r in rounds[1:-1])  # the last one has no room for a draft


def test_no_token_twice_when_a_draft_is_empty_after_full_acceptance() -> None:
    """A draft that is empty after a full acceptance prints no token twice.

    https://github.com/ikawrakow/ik_llama.cpp/pull/2065
    """
    perfect = model_drafter(blend=0.0)

    class Alternating(ScriptedDrafter):
        turn = False

        def draft(self, context, gate, sampler, rng):  # type: ignore[no-untyped-def]
            self.turn = not self.turn
            return Draft() if self.turn else perfect.draft(context, gate, sampler, rng)

        def accept(self, verified):  # type: ignore[no-untyped-def]
            perfect.accept(verified)

    rounds = list(run(engine(), Alternating(lambda c: [])))
    assert [r.n_draft for r in rounds[:4]] == [0, 4, 0, 4]
    assert tokens_of(rounds) == alone()


def test_a_model_that_drafts_for_itself_accepts_everything_to_the_end() -> None:
    """If the draft's cache were out of step, acceptance would sink while the text stays right.

    https://github.com/lablup/mlxcel/issues/994
    """
    rounds = list(run(engine(), model_drafter(blend=0.0), n_predict=1000))
    drafted = [r for r in rounds if r.n_draft]
    assert all(r.n_accepted == r.n_draft for r in drafted)
    pattern = [[r.origin_of(i) for i in range(r.n_emitted)] for r in drafted[:-1]]
    assert all(p == [Origin.DRAFT] * 4 + [Origin.BONUS] for p in pattern)


def test_own_cache_is_fed_each_token_once() -> None:
    """After a full acceptance the last draft token and the bonus token go in as one batch."""
    drafter = model_drafter(blend=0.0)
    list(run(engine(), drafter, n_predict=21, n_draft=4))
    assert isinstance(drafter.sequence, FakeSequence)
    assert drafter.sequence.widths[:10] == [3, 1, 1, 1, 1, 2, 1, 1, 1, 2]


def test_acceptance_at_the_first_place_does_not_depend_on_n_draft() -> None:
    """Over the same contexts, n_draft 1 and the first place of n_draft 4 accept the same.

    https://github.com/vllm-project/vllm/pull/9730
    """

    def first_place(n_draft: int) -> dict[int, bool]:
        rounds = run(engine(), model_drafter(blend=0.5), n_predict=400, n_draft=n_draft)
        return {r.n_context: r.n_accepted > 0 for r in rounds if r.n_draft}

    of_1, of_4 = first_place(1), first_place(4)
    shared = of_1.keys() & of_4.keys()
    assert len(shared) > 50
    assert {k: of_1[k] for k in shared} == {k: of_4[k] for k in shared}


@pytest.mark.parametrize("plain_every", [2, 3, 5])
def test_rounds_without_a_draft_leave_the_draft_in_step(plain_every: int) -> None:
    """Rounds without a draft do not leave the draft's cache stale.

    https://github.com/vllm-project/vllm-metal/pull/716
    """
    rounds = list(run(engine(), model_drafter(8, 0.0), n_predict=200, plain_every=plain_every))
    assert all(r.n_accepted == r.n_draft for r in rounds)
    assert any(r.n_draft == 0 for r in rounds[3:])


def test_a_full_draft_context_warns_once_and_the_target_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A draft context smaller than the target's does not end the program.

    https://github.com/ggml-org/llama.cpp/issues/22554
    """
    with caplog.at_level(logging.WARNING, logger="qdraft"):
        rounds = list(run(engine(), model_drafter(blend=0.0, n_ctx=20), n_predict=40))
    assert tokens_of(rounds) == alone(40)
    assert [r.message for r in caplog.records] == [
        "the draft's context of 20 tokens is full: the target goes on alone"
    ]
    assert sum(r.n_accepted for r in rounds) > 10
    assert all(r.n_draft == 0 for r in rounds if r.n_context > 20)


def test_the_context_is_never_overrun() -> None:
    """Prompt and text fill the context to the last place, and the finish reason says so.

    https://github.com/turboderp-org/exllamav2/issues/274
    """
    for n_draft in range(6):
        target = engine(n_ctx=16)
        rounds = list(
            run(target, model_drafter(blend=0.0, n_ctx=16), n_predict=-1, n_draft=n_draft)
        )
        assert len(tokens_of(rounds)) == 16 - 3
        assert rounds[-1].finish_reason is FinishReason.CONTEXT_FULL


@pytest.mark.parametrize("n_predict", range(8))
def test_exactly_as_many_tokens_as_asked(n_predict: int) -> None:
    """A draft that is always right gives neither more tokens than asked for nor fewer than counted.

    https://github.com/ohdearquant/lattice/pull/245
    https://github.com/ikawrakow/ik_llama.cpp/pull/2358
    """
    rounds = list(run(engine(), model_drafter(blend=0.0), n_predict=n_predict, n_draft=4))
    assert len(tokens_of(rounds)) == n_predict
    if n_predict:
        assert rounds[-1].finish_reason is FinishReason.LENGTH


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextError, match=r"20 tokens.*holds 20"):
        list(run(engine(n_ctx=20), NoDrafter(), prompt=[1] * 20))


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_an_end_token_inside_a_block_cuts_everything(params: SamplingParams) -> None:
    """Text, counts and both caches stop at the end token.

    https://github.com/huggingface/transformers/issues/47912
    """
    cycle = [3, 4, 5, 6, 7]  # what both models say, over and over; 6 ends the text

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        row = np.full(8, -50.0)
        row[cycle[(len(tokens) - 3) % 5]] = 50.0
        return row

    target = FakeSequence(logits, vocab(8, end=[6]))
    drafter = ModelDrafter(
        FakeSequence(logits, vocab(8, end=[])), 8
    )  # the draft does not stop itself
    rounds = list(
        run(
            target,
            drafter,
            params=params,
            reader=TokenReader(target.vocab.is_end),
        )
    )
    last = rounds[-1]
    assert tokens_of(rounds) == [3, 4, 5, 6]
    assert (last.n_draft, last.n_accepted, last.n_tested, last.n_emitted) == (4, 3, 3, 3)
    assert last.finish_reason is FinishReason.END_OF_GENERATION
    assert target.tokens == [1, 0, 2, 3, 4, 5]
    assert isinstance(drafter.sequence, FakeSequence)
    assert drafter.sequence.tokens == [1, 0, 2, 3, 4, 5]


def test_the_drafter_stops_at_an_end_token_and_the_target_verifies_it() -> None:
    """A drafted end token does not end the text by itself.

    https://github.com/ohdearquant/lattice/issues/237
    """
    drafter = model_drafter(blend=0.9, end=range(8))  # to the draft every token is an end
    rounds = list(run(engine(), drafter))
    assert all(r.n_draft <= 1 for r in rounds)
    assert tokens_of(rounds) == alone()
    assert 0 < sum(r.n_accepted for r in rounds) < sum(r.n_draft for r in rounds)


PENALTIES = SamplingParams(
    temperature=0, repeat_penalty=1.5, repeat_last_n=5, presence_penalty=0.4, frequency_penalty=0.3
)


@pytest.mark.parametrize("n_draft", [1, 3, 6])
def test_penalties_see_the_draft_row_by_row(n_draft: int) -> None:
    """The tokens are those of the target alone, and a model that drafts for itself accepts all.

    https://github.com/sgl-project/sglang/pull/33643
    """
    plain = tokens_of(list(run(engine(), NoDrafter(), params=PENALTIES, n_predict=120)))
    own = list(
        run(engine(), model_drafter(blend=0.0), params=PENALTIES, n_predict=120, n_draft=n_draft)
    )
    other = list(run(engine(), model_drafter(), params=PENALTIES, n_predict=120, n_draft=n_draft))
    assert tokens_of(own) == tokens_of(other) == plain != alone(120)
    assert all(r.n_accepted == r.n_draft for r in own)


def nan_at(length: int, blend: float = 0.0) -> FakeSequence:
    logits = table_logits(8, 7, blend=blend)
    bad = np.full(8, np.nan)
    return FakeSequence(lambda tokens: bad if len(tokens) == length else logits(tokens), vocab(8))


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_nan_in_the_draft_drops_the_round(params: SamplingParams) -> None:
    """A row of NaN in the draft: the text goes on, the round is counted, later drafts are fine.

    https://github.com/ggml-org/llama.cpp/issues/23606
    """
    rounds = list(run(engine(), ModelDrafter(nan_at(10), 8), params=params))
    assert len(tokens_of(rounds)) == 32
    assert sum(r.draft.dropped for r in rounds) >= 1
    assert any(r.n_accepted for r in rounds if r.n_context > 10)
    if params is GREEDY:
        assert tokens_of(rounds) == alone()


@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_nan_in_the_target_is_an_error(params: SamplingParams) -> None:
    """A row of NaN in the target stops the text with an error.

    https://github.com/ggml-org/llama.cpp/issues/23606
    """
    with pytest.raises(LogitsError, match="nan"):
        list(run(nan_at(10), model_drafter(blend=0.0), params=params))


def test_a_refused_rollback_is_an_error() -> None:
    with pytest.raises(RollbackError):
        list(run(engine(can_rollback=False), model_drafter(blend=0.8)))


def test_between_rounds_the_target_holds_all_but_the_last_token() -> None:
    target, drafter = engine(), model_drafter()
    text = [1, 0, 2]
    for r in run(target, drafter, n_predict=64):
        text += r.tokens
        assert target.tokens == text[:-1]
        assert isinstance(drafter.sequence, FakeSequence)
        assert drafter.sequence.tokens == text[: drafter.sequence.n_past]
        assert r.n_tested == (r.n_accepted if r.n_accepted == r.n_draft else r.n_accepted + 1)


def test_the_prompt_round_drafts_nothing() -> None:
    """The first token is not kept waiting for the draft's own reading of the prompt."""
    first = next(run(engine(), model_drafter()))
    assert (first.n_prompt, first.n_draft, first.n_emitted, first.origin_of(0)) == (
        3,
        0,
        1,
        Origin.TARGET,
    )


def test_the_round_of_a_prompt_of_one_token_drafts_nothing_either() -> None:
    first = next(run(engine(), model_drafter(), prompt=[1]))
    assert (first.n_prompt, first.n_draft) == (1, 0)


def test_p_min_stops_on_the_distribution_not_on_the_draw() -> None:
    rounds = list(run(engine(), model_drafter(), params=PLAIN, p_min=0.5, n_predict=200))
    sampler = Sampler(PLAIN, 8)
    logits = table_logits(8, 7, blend=0.3)
    text = [1, 0, 2]
    n_stopped = 0
    for r in rounds:
        if r.n_context + 5 <= 203 and r.index > 0:
            for i in range(min(r.n_draft + 1, 4)):
                row = np.array(logits((*text, *r.draft.tokens[:i])), dtype=np.float32)
                assert (sampler.propose(row, text).confidence >= 0.5) == (i < r.n_draft)
            n_stopped += r.n_draft < 4
        text += r.tokens
    assert n_stopped > 10


def test_rows_after_a_rejection_are_not_looked_at() -> None:
    rows = np.array([[0, 1, 0], [np.nan] * 3], dtype=np.float32)
    verdict = verify(Draft((2,)), rows, [0], Sampler(GREEDY, 3), SeededRng(0), "token")
    assert (verdict.n_accepted, verdict.n_tested, verdict.tokens[-1]) == (0, 1, 1)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_bad_row_ends_the_draft_before_it(rule: str) -> None:
    """Whatever stands before the row stands; the row counts once the text needs it."""
    rows = np.log(np.array([[0.2, 0.8], [0.6, 0.4], [np.nan] * 2, [0.5, 0.5]], dtype=np.float32))
    even = Distribution(np.array([0.5, 0.5]))
    asked = []

    class Accepting(SeededRng):
        def accept(self, probability: float) -> bool:
            asked.append(probability)
            return probability > 0

    draft = Draft((1, 0, 1), (even, even, even))
    verdict = verify(draft, rows, [0], Sampler(PLAIN, 2), Accepting(0), rule)
    assert (verdict.tokens, verdict.n_tested, verdict.origin) == ((1, 0), 2, Origin.DRAFT)
    assert asked == [1.0] if rule == "block" else [1.0, 1.0]
    greedy = verify(draft, rows, [0], Sampler(GREEDY, 2), SeededRng(0), rule)
    assert greedy.tokens == (1, 0)
    with pytest.raises(LogitsError):
        verify(Draft(draft.tokens[2:]), rows[2:], [0], Sampler(GREEDY, 2), SeededRng(0), rule)


@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("params", [GREEDY, PLAIN])
def test_rows_after_the_end_of_a_text_are_not_needed(params: SamplingParams, block: bool) -> None:
    """A drafted end of generation stands, and the row of NaN behind it concerns nobody."""

    def logits(tokens: tuple[int, ...]) -> list[float]:
        if 2 in tokens:
            return [np.nan] * 3
        return [-99, 99, -99] if len(tokens) == 1 else [-99, -99, 99]

    rounds = list(
        run(
            FakeSequence(logits, vocab(3, end=[2])),
            ScriptedDrafter(lambda context: [2, 0]),
            params=params,
            prompt=[0],
            block=block,
            reader=TokenReader(lambda token: token == 2),
        )
    )
    assert tokens_of(rounds) == [1, 2]
    assert rounds[-1].n_draft == 2
    assert rounds[-1].finish_reason is FinishReason.END_OF_GENERATION
    assert rounds[-1].origin_of(0) is Origin.DRAFT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_draft_row_that_its_gate_would_turn_away_leaves_no_cell(temperature: float) -> None:
    """Its confidence may be too low for the gate, so the row is judged before the gate is asked."""
    logits = table_logits(8, 7, blend=0.3)
    draft = FakeSequence(lambda t: [np.nan] * 8 if len(t) == 3 else logits(t), vocab(8))
    drafter = ModelDrafter(draft, 8)
    sampler = Sampler(replace(PLAIN, temperature=temperature), 8)
    drafter.begin(PROMPT)
    offered = drafter.draft(PROMPT, CountingGate(4, p_min=0.99), sampler, SeededRng(0))
    assert (offered.dropped, offered.tokens, offered.n_rows) == (True, (), 1)
    assert draft.n_past < len(PROMPT)


class TestSharedKv:
    """The draft on copies of the target's cells."""

    def pair(
        self, blend: float = 0.3, **kwargs: object
    ) -> tuple[FakeSequence, ModelDrafter, FakeKvCopy]:
        target, draft = engine(), engine(blend=blend, **kwargs)
        courier = FakeKvCopy(target, draft)
        return target, ModelDrafter(draft, 8, courier), courier

    @pytest.mark.parametrize("plain_every", [0, 3])
    def test_same_text_as_with_its_own(self, plain_every: int) -> None:
        target, drafter, _ = self.pair()
        rounds = list(run(target, drafter, n_predict=120, plain_every=plain_every))
        assert tokens_of(rounds) == alone(120)
        own = list(run(engine(), model_drafter(), n_predict=120, plain_every=plain_every))
        assert [r.n_accepted for r in rounds] == [r.n_accepted for r in own]

    def test_the_draft_reads_no_prompt_and_each_cell_is_copied_once(self) -> None:
        target, drafter, courier = self.pair(blend=0.0)
        rounds = list(run(target, drafter, n_predict=100, prompt=[1] * 50))
        assert isinstance(drafter.sequence, FakeSequence)
        assert set(drafter.sequence.widths) == {1}
        drafted = [r for r in rounds if r.n_draft]
        assert [r.draft.n_caught_up for r in drafted[:3]] == [50, 0, 0]  # the prompt, copied
        assert courier.starts[:3] == [0, 50, 55]
        assert sum(r.n_accepted for r in rounds) == sum(r.n_draft for r in rounds)

    def test_the_cells_before_a_draft_are_the_targets(self) -> None:
        target, drafter, _ = self.pair(blend=0.6)
        text = [1, 0, 2]
        for r in run(target, drafter, n_predict=64, plain_every=4):
            assert isinstance(drafter.sequence, FakeSequence)
            if r.n_draft:
                assert drafter.sequence.tokens[: len(text) - 1] == text[:-1]
            text += r.tokens

    def test_a_draft_context_that_fills_up(self) -> None:
        target, drafter, _ = self.pair(blend=0.0, n_ctx=20)
        rounds = list(run(target, drafter, n_predict=40))
        assert tokens_of(rounds) == alone(40)
        assert all(r.n_draft == 0 for r in rounds if r.n_context > 20)

    def test_a_second_text_starts_afresh(self) -> None:
        target, drafter, courier = self.pair()
        list(run(target, drafter, n_predict=30))
        courier.starts.clear()
        rounds = list(run(target, drafter, n_predict=30, prompt=[3, 3, 3, 3]))
        assert courier.starts[0] == 0
        assert tokens_of(rounds) == alone(30, prompt=[3, 3, 3, 3])


class TestSteps:
    """A text made a round at a time, from outside the loop."""

    prompts = ((1, 0, 2), (4, 4, 3, 1))

    def decoding(self, prompt: tuple[int, ...], target: FakeSequence | None = None) -> Decoding:
        return Decoding(
            target or engine(),
            model_drafter(),
            prompt,
            Sampler(PLAIN, 8),
            FixedSchedule(4),
            SeededRng(len(prompt)),
            FakeClock(),
            n_predict=60,
        )

    def test_texts_that_take_turns_are_those_of_one_after_the_other(self) -> None:
        alone = [tokens_of(list(self.decoding(prompt))) for prompt in self.prompts]
        both = [self.decoding(prompt) for prompt in self.prompts]
        texts: list[list[int]] = [[], []]
        while any(decoding.finish_reason is None for decoding in both):
            for decoding, text in zip(both, texts, strict=True):
                if decoding.finish_reason is None:
                    text += decoding.step().tokens
        assert texts == alone
        assert alone[0] != alone[1]
        assert [decoding.tokens[-60:] for decoding in both] == alone

    def test_nothing_follows_the_end(self) -> None:
        decoding = self.decoding(self.prompts[0])
        list(decoding)
        with pytest.raises(UsageError, match="the text has ended: length"):
            decoding.step()

    def test_a_common_prefix_is_kept_and_not_read_again(self) -> None:
        target, drafter = engine(), model_drafter()
        first = tokens_of(list(run(target, drafter, n_predict=20)))
        draft = drafter.sequence
        assert isinstance(draft, FakeSequence)
        n_cached = draft.n_past
        longer = [*PROMPT, *first, 5, 5, 3]
        target.widths.clear()
        rounds = list(run(target, drafter, prompt=longer, n_predict=20))
        # The cache held all but the last token of the first text; the last of the new prompt and
        # the three after it were read.
        assert rounds[0].n_prompt == target.widths[0] == 4
        assert next(r.draft.n_caught_up for r in rounds if r.n_draft) == 26 - n_cached
        assert tokens_of(rounds) == alone(20, prompt=longer)

    def test_another_text_leaves_nothing_behind(self) -> None:
        target, drafter = engine(), model_drafter()
        list(run(target, drafter, n_predict=20))
        rounds = list(run(target, drafter, prompt=(1, 7, 7), n_predict=20))
        assert rounds[0].n_prompt == 2  # the first token was common
        assert tokens_of(rounds) == alone(20, prompt=(1, 7, 7))

    def test_the_same_prompt_again_reads_its_last_token(self) -> None:
        target, drafter = engine(), model_drafter()
        first = list(run(target, drafter))
        again = list(run(target, drafter))
        assert (first[0].n_prompt, again[0].n_prompt) == (3, 1)
        assert tokens_of(again) == tokens_of(first)

    def test_a_stop_string_inside_a_block_leaves_both_caches_in_step(self) -> None:
        target, drafter = engine(), model_drafter(blend=0.0)
        text = alone(32)
        stop = "".join(target.vocab.piece(t).decode() for t in text[5:8])  # ends within a round
        reader = TextReader(target.vocab, (stop,))
        rounds = list(run(target, drafter, reader=reader))
        last = rounds[-1]
        assert last.finish_reason is FinishReason.STOP_STRING
        assert tokens_of(rounds) == text[:8]
        assert last.n_emitted == len(reader.pieces) < len(last.verdict.tokens)
        assert last.n_accepted == last.n_tested == last.n_emitted < last.verdict.n_accepted
        assert target.tokens == [*PROMPT, *text[:7]]
        assert isinstance(drafter.sequence, FakeSequence)
        assert drafter.sequence.tokens == target.tokens[: drafter.sequence.n_past]


class TestCheck:
    """The text is the target's, or the check says where it forks and whether numerics explain it.

    https://github.com/ggml-org/llama.cpp/issues/25618
    https://github.com/ggml-org/llama.cpp/issues/27407
    """

    sampler = Sampler(GREEDY, 8)

    def test_same(self) -> None:
        rounds = list(run(engine(), model_drafter()))
        assert check(engine(), (1, 0, 2), rounds, self.sampler) == Check(
            True, True, None, None, 0.0
        )

    def test_a_bug_is_a_fork_that_noise_does_not_explain(self) -> None:
        rounds = list(run(engine(), model_drafter()))
        place = sum(r.n_emitted for r in rounds[:3])
        logits = table_logits(8, 7)((1, 0, 2, *tokens_of(rounds)[:place]))
        planted = int(np.argsort(logits)[-2])
        rounds[3] = replace(rounds[3], tokens=(planted, *rounds[3].tokens[1:]))
        result = check(engine(), (1, 0, 2), rounds, self.sampler)
        assert (result.same, result.fork, result.explained) == (False, place, False)
        assert result.margin == pytest.approx(float(np.max(logits) - logits[planted]), abs=1e-5)
        assert result.noise == 0

    def test_numerics_explain_a_fork_within_the_noise(self) -> None:
        """An engine whose rows differ a little in batches, as llama.cpp's do."""

        class Noisy(FakeSequence):
            def eval(self, tokens, logits):  # type: ignore[no-untyped-def]
                rows = super().eval(tokens, logits)
                return rows + (len(tokens) > 1) * np.where(np.arange(8) % 2, 0.4, -0.4)

        def noisy() -> Noisy:
            return Noisy(table_logits(8, 7), vocab(8))

        prompt = (1,)  # read alone by both
        rounds = list(run(noisy(), model_drafter(), n_predict=400, prompt=prompt))
        result = check(noisy(), prompt, rounds, self.sampler)
        assert result.fork is not None
        assert result.margin is not None
        assert 0 < result.margin <= 0.8 + 1e-5
        assert result.noise == pytest.approx(0.4, abs=1e-5)
        assert result.explained
        plain = tokens_of(list(run(noisy(), NoDrafter(), n_predict=400, prompt=prompt)))
        emitted = tokens_of(rounds)
        assert plain[: result.fork] == emitted[: result.fork]
        assert plain[result.fork] != emitted[result.fork]

    def test_a_sampled_token_outside_the_support_is_found(self) -> None:
        params = SamplingParams(temperature=1, top_k=2, top_p=1, min_p=0)
        rounds = list(run(engine(), model_drafter(), params=params))
        sampler = Sampler(params, 8)
        assert check(engine(), (1, 0, 2), rounds, sampler).same
        logits = table_logits(8, 7)((1, 0, 2, *rounds[0].tokens))
        rounds[1] = replace(rounds[1], tokens=(int(np.argmin(logits)), *rounds[1].tokens[1:]))
        assert check(engine(), (1, 0, 2), rounds, sampler).fork == 1
