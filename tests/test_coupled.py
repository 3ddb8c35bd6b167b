"""Coupled verification: a seed gives the target's own text, whatever is drafted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from fakes import (
    GREEDY,
    PLAIN,
    PROMPT,
    distance,
    engine,
    model_drafter,
    run,
    table_logits,
    target_law,
    tokens_of,
    vocab,
)
from numpy.typing import NDArray
from test_exactness import LAWS, NeverTwice, chi_square

from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import Round, SamplingParams
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Row, Sampler, Scores, softmax
from qdraft.errors import UsageError
from qdraft.session.check import Check, check
from qdraft.testing import FakeClock, FakeSequence, ScriptedDrafter, enumerate_law


def write(
    seed: int, drafter: Drafter, params: SamplingParams = PLAIN, **how: object
) -> list[Round]:
    return list(run(engine(), drafter, params=params, gumbel=GumbelNoise(seed), **how))  # type: ignore[arg-type]


class TestNoise:
    """Gumbel numbers that depend on seed, place and token alone."""

    def test_they_have_the_gumbel_law(self) -> None:
        for noise in (
            GumbelNoise(3).at(9, np.arange(50_000)),
            _over_places(GumbelNoise(3), 20_000),
        ):
            ordered = np.exp(-np.exp(-np.sort(noise)))  # uniform if the noise is Gumbel
            expected = (np.arange(len(noise)) + 0.5) / len(noise)
            # Kolmogorov: the largest difference is above 2 / sqrt(n) once in 1,500 times.
            assert np.abs(ordered - expected).max() < 2 / math.sqrt(len(noise))

    def test_neighbours_are_independent(self) -> None:
        by_place = np.stack([GumbelNoise(5).at(place, np.arange(300)) for place in range(300)])
        by_seed = np.stack([GumbelNoise(seed).at(7, np.arange(300)) for seed in range(300)])
        for table in (by_place, by_seed):
            for these, others in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
                assert abs(np.corrcoef(these.ravel(), others.ravel())[0, 1]) < 0.015  # 4.5 sigma

    def test_a_candidate_has_the_noise_of_the_whole_row(self) -> None:
        ids = np.array([3, 17, 151_000])
        assert np.array_equal(
            GumbelNoise(1).at(4, ids), GumbelNoise(1).at(4, np.arange(152_000))[ids]
        )

    def test_every_seed_has_its_own(self) -> None:
        seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
        first = {float(GumbelNoise(seed).at(0, np.arange(1))[0]) for seed in seeds}
        assert len(first) == len(seeds)
        assert np.isfinite(GumbelNoise(2**64 - 1).at(2**40, np.arange(1000))).all()


def _over_places(noise: GumbelNoise, n: int) -> NDArray[np.float64]:
    return np.array([noise.at(place, np.array([11]))[0] for place in range(n)])


def _scripted() -> Drafter:
    return ScriptedDrafter(lambda context: [(context[-1] + 1) % 8, 3, 3])


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "model": model_drafter,
    "a bad model": lambda: model_drafter(blend=1.0),
    "ngram": NgramDrafter,
    "hybrid": lambda: HybridDrafter(NgramDrafter(), model_drafter()),
    "scripted": _scripted,
}


class TestOneSeedOneText:
    @pytest.mark.parametrize("name", LAWS)
    @pytest.mark.parametrize("drafter", DRAFTERS)
    def test_whatever_is_drafted(self, drafter: str, name: str) -> None:
        n_accepted = 0
        for seed in range(4):
            alone = tokens_of(write(seed, NoDrafter(), LAWS[name], n_predict=60))
            for n_draft in (1, 3, 7):
                how = {"n_predict": 60, "n_draft": n_draft, "p_min": 0.1 * (n_draft == 3)}
                rounds = write(seed, DRAFTERS[drafter](), LAWS[name], **how)
                assert tokens_of(rounds) == alone
                n_accepted += sum(r.n_accepted for r in rounds)
        assert (n_accepted > 0) == (drafter != "none")

    def test_another_seed_gives_another_text(self) -> None:
        assert len({tuple(tokens_of(write(seed, NoDrafter()))) for seed in range(20)}) == 20

    def test_a_text_goes_on_where_another_stopped(self) -> None:
        """The noise belongs to the place in the text, not to the number of tokens drawn."""
        whole = tokens_of(write(5, model_drafter(), n_predict=30))
        for n in (1, 10, 17):
            prompt = (*PROMPT, *whole[:n])
            assert (
                tokens_of(write(5, model_drafter(), n_predict=30 - n, prompt=prompt)) == whole[n:]
            )

    def test_a_bad_draft_row_changes_nothing(self) -> None:
        logits = table_logits(8, 7, blend=0.3)

        def bad(tokens: tuple[int, ...]) -> Sequence[float]:
            return [math.nan] * 8 if len(tokens) % 5 == 0 else logits(tokens)

        rounds = write(3, ModelDrafter(FakeSequence(bad, vocab(8)), 8))
        assert any(r.draft.dropped for r in rounds)
        assert tokens_of(rounds) == tokens_of(write(3, NoDrafter()))

    def test_greedy_is_greedy(self) -> None:
        rounds = write(3, model_drafter(), GREEDY)
        assert tokens_of(rounds) == tokens_of(list(run(engine(), NoDrafter())))

    def test_the_rule_and_the_noise_belong_together(self) -> None:
        for rule, noise in (("coupled", None), ("block", GumbelNoise(1))):
            sampler = Sampler(PLAIN, 8, gumbel=noise)
            with pytest.raises(UsageError, match="only coupled needs a sampler with Gumbel noise"):
                Decoding(
                    engine(),
                    NoDrafter(),
                    PROMPT,
                    sampler,
                    FixedSchedule(4, 0.0),
                    SeededRng(1),
                    FakeClock(),
                    verification=rule,
                )


# The noise of 20 places, each one of a few tables, so that all of it can be enumerated. Values of
# other columns than these few tokens do not exist.
N_TABLES, N_VOCAB = 3, 3
TABLES = np.random.default_rng(4).gumbel(size=(N_TABLES, N_VOCAB))


class EnumeratedNoise(GumbelNoise):
    """Noise whose table at each place is a random decision of its own."""

    def __init__(self, rng: Rng) -> None:
        super().__init__(0)
        self._rng = rng
        self._tables: dict[int, int] = {}

    def at(self, place: int, tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        if place not in self._tables:
            self._tables[place] = self._rng.draw(np.ones(N_TABLES))
        return TABLES[self._tables[place]][tokens]


def _stale(self: Sampler, row: Row, context: Sequence[int], drafted: Sequence[int] = ()) -> Scores:
    """A planted fault: all rows of a round take the noise of its first place."""
    logits, ids = self._truncate(self.process(row, context, drafted))
    tokens = np.arange(len(logits)) if ids is None else ids
    assert self.gumbel is not None
    return Scores(logits / self.params.temperature + self.gumbel.at(len(context), tokens), ids)


class TestLaw:
    """The law of the texts over all seeds is the target's."""

    @pytest.mark.parametrize("fault", [False, True], ids=["none", "noise of the wrong place"])
    def test_the_law_is_that_of_the_target_alone_by_enumeration(
        self, fault: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Exact for any law of the noise, if that of one place is independent of the others'."""

        def law(drafter: Callable[[], Drafter]) -> dict[tuple[int, ...], float]:
            def program(rng: Rng) -> tuple[int, ...]:
                noise = EnumeratedNoise(rng)
                how = {"params": PLAIN, "n_predict": 5, "n_draft": 2, "gumbel": noise}
                rounds = run(engine(N_VOCAB), drafter(), **how)  # type: ignore[arg-type]
                return tuple(tokens_of(list(rounds)))

            return enumerate_law(program)

        alone = law(NoDrafter)
        if fault:
            monkeypatch.setattr(Sampler, "scores", _stale)
        off = distance(law(lambda: model_drafter(N_VOCAB)), alone)
        assert off > 1e-2 if fault else off < 1e-12

    @pytest.mark.parametrize("name", ["temperature 1", "penalties and bias", "mixture"])
    def test_chi_square_of_the_loop(self, name: str) -> None:
        assert chi_square(_texts(LAWS[name]), target_law(LAWS[name], 6, 4)) > 1e-3

    def test_chi_square_under_a_processor_of_ones_own(self) -> None:
        texts = _texts(PLAIN, processors=[NeverTwice()])
        assert chi_square(texts, target_law(PLAIN, 6, 4, processors=[NeverTwice()])) > 1e-3

    def test_chi_square_catches_noise_of_the_wrong_place(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Sampler, "scores", _stale)
        assert chi_square(_texts(PLAIN), target_law(PLAIN, 6, 4)) < 1e-6

    def test_chi_square_catches_noise_that_is_not_gumbel(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gumbel = GumbelNoise.at
        monkeypatch.setattr(GumbelNoise, "at", lambda *args: 1.3 * gumbel(*args))
        assert chi_square(_texts(PLAIN), target_law(PLAIN, 6, 4)) < 1e-6


def _texts(params: SamplingParams, **how: object) -> list[tuple[int, ...]]:
    texts = []
    for seed in range(1500):
        rounds = run(
            engine(6),
            model_drafter(6),
            params=params,
            n_predict=4,
            n_draft=2,
            gumbel=GumbelNoise(seed),
            **how,  # type: ignore[arg-type]
        )
        texts.append(tuple(tokens_of(list(rounds))))
    return texts


def test_acceptance_is_that_of_gumbel_coupling() -> None:
    """Of one place, both choose x with probability 1 / sum over y of max(p_y / p_x, q_y / q_x).

    That is less than rejection's sum of min(p, q), and more than the sum of p q, which is the
    chance that two draws agree.
    """
    p, q = (softmax(table_logits(8, 7, blend=b)(PROMPT)) for b in (0.0, 0.3))
    coupled = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(8))
    rows = [np.log(each).astype(np.float32) for each in (p, q)]
    n_seeds = 4000
    same = 0
    for seed in range(n_seeds):
        sampler = Sampler(PLAIN, 8, gumbel=GumbelNoise(seed))
        same += len({sampler.choose(row, PROMPT) for row in rows}) == 1
    sigma = math.sqrt(coupled * (1 - coupled) / n_seeds)
    assert same / n_seeds == pytest.approx(coupled, abs=4 * sigma)
    assert (p * q).sum() + 10 * sigma < coupled < np.minimum(p, q).sum() - 4 * sigma


def test_a_proposal_is_as_sure_as_its_score() -> None:
    """The confidence is that of a softmax of the scores, and only the chosen token has it."""
    row = np.array([0.5, 2.0, 1.0, -1.0], np.float32)
    sampler = Sampler(replace(PLAIN, top_k=3), 4, gumbel=GumbelNoise(8))
    scores = sampler.scores(row, [1], [2])
    proposal = sampler.propose(row, [1], [2])
    token = proposal.token(SeededRng(0))
    assert token == scores.best == sampler.choose(row, [1, 2])
    assert proposal.probs is None
    assert proposal.confidence == pytest.approx(softmax(np.asarray(scores.values)).max())
    assert proposal.confidence_in(token) == proposal.confidence
    assert proposal.confidence_in((token + 1) % 4) == 0
    assert [scores.of(3), scores.of(token)] == [None, float(scores.values.max())]


class TestCheck:
    """`--check` compares token by token, at any temperature."""

    params = SamplingParams(temperature=1.3, top_k=5, top_p=0.9)

    def check(self, rounds: Sequence[Round], seed: int = 6) -> Check:
        return check(engine(), PROMPT, rounds, Sampler(self.params, 8, gumbel=GumbelNoise(seed)))

    def test_the_same_text(self) -> None:
        rounds = write(6, model_drafter(), self.params)
        assert self.check(rounds) == Check(True, True, None, None, 0.0)

    def test_the_text_of_another_seed_is_a_bug(self) -> None:
        result = self.check(write(7, model_drafter(), self.params))
        assert (result.same, result.explained) == (False, False)

    @pytest.mark.parametrize("place", range(8))
    def test_another_possible_token_is_a_bug(self, place: int) -> None:
        """A check of the support alone would not see it."""
        rounds = write(6, model_drafter(), self.params)
        n, index = 0, 0
        while n + rounds[index].n_emitted <= place:
            n, index = n + rounds[index].n_emitted, index + 1
        tokens = list(rounds[index].tokens)
        context = (*PROMPT, *tokens_of(rounds)[:place])
        sampler = Sampler(self.params, 8, gumbel=GumbelNoise(6))
        row = np.array(table_logits(8, 7)(context), np.float32)
        scores = sampler.scores(row, context)
        assert scores.ids is not None
        planted = next(int(x) for x in scores.ids if x != tokens[place - n])
        tokens[place - n] = planted
        rounds[index] = replace(rounds[index], tokens=tuple(tokens))
        result = self.check(rounds)
        assert (result.same, result.fork, result.explained) == (False, place, False)
        needed = (max(scores.values) - (scores.of(planted) or 0.0)) * 1.3
        assert result.margin == pytest.approx(needed)

    def test_numerics_explain_a_token_that_the_rows_of_its_round_give_again(self) -> None:
        """Also at the edge of top-p, where the margin says little: the last token is in or out."""

        class Noisy(FakeSequence):
            def eval(self, tokens, logits):  # type: ignore[no-untyped-def]
                rows = super().eval(tokens, logits)
                return rows + (len(tokens) > 1) * np.where(np.arange(8) % 2, 0.1, -0.1)

        n_beyond = 0
        for seed in range(40):
            noise = GumbelNoise(seed)
            how = {"params": self.params, "n_predict": 60, "prompt": (1,), "gumbel": noise}
            target = Noisy(table_logits(8, 7), vocab(8))
            rounds = list(run(target, model_drafter(), **how))  # type: ignore[arg-type]
            sampler = Sampler(self.params, 8, gumbel=noise)
            result = check(Noisy(table_logits(8, 7), vocab(8)), (1,), rounds, sampler)
            assert result.explained
            assert result.repeated == (result.fork is not None)
            n_beyond += (result.margin or 0) > 2 * (result.noise or 0)
        assert n_beyond
