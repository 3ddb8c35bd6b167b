"""The emitted text has exactly the target's law: by enumeration, by chi-square, with planted faults."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

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

import qdraft.decoding.verification as acceptance
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.records import Distribution, Draft, SamplingParams, Verdict
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import History, Row, Sampler, draw
from qdraft.decoding.verification import block_rejection, rejection
from qdraft.errors import LogitsError
from qdraft.testing import FakeSequence, ScriptedDrafter, enumerate_law

PENALTIES = SamplingParams(
    temperature=0.9,
    top_k=0,
    top_p=1,
    min_p=0,
    repeat_penalty=1.4,
    repeat_last_n=4,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={2: 0.7, 4: -math.inf},
)
LAWS = {
    "temperature 1": PLAIN,
    "temperature 0.6": SamplingParams(temperature=0.6, top_k=0, top_p=1, min_p=0),
    "top-k": SamplingParams(temperature=1, top_k=3, top_p=1, min_p=0),
    "top-p": SamplingParams(temperature=1, top_k=0, top_p=0.7, min_p=0),
    "min-p": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0.2),
    "typical-p": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, typical_p=0.7),
    "penalties and bias": PENALTIES,
    "llama.cpp's defaults": SamplingParams(),
    "top-n-sigma": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0, top_n_sigma=1.0),
    "xtc and dynamic temperature": SamplingParams(
        top_k=0, top_p=1, min_p=0, xtc_probability=0.4, dynatemp_range=0.5, dynatemp_exp=1.5
    ),
    "mixture": SamplingParams(
        temperature=1.3, top_k=5, top_p=0.9, min_p=0.05, repeat_penalty=1.2, repeat_last_n=3
    ),
}


def loop_law(
    params: SamplingParams,
    n_vocab: int,
    n_predict: int,
    n_draft: int,
    block: bool,
    p_min: float = 0,
) -> dict[tuple[int, ...], float]:
    def program(rng: Rng) -> tuple[int, ...]:
        rounds = run(
            engine(n_vocab),
            model_drafter(n_vocab),
            params=params,
            n_predict=n_predict,
            n_draft=n_draft,
            rng=rng,
            block=block,
            p_min=p_min,
        )
        return tuple(tokens_of(list(rounds)))

    return enumerate_law(program)


block_or_token = pytest.mark.parametrize("block", [False, True], ids=["token", "block"])


@block_or_token
@pytest.mark.parametrize("name", LAWS)
def test_law_of_one_round_by_enumeration(name: str, block: bool) -> None:
    """The token of a round at each place has the law p given those before it."""
    params, n_vocab = LAWS[name], 5
    sampler = Sampler(params, n_vocab)
    target, other = table_logits(n_vocab, 7), table_logits(n_vocab, 7, blend=0.4)

    def dist(logits: Callable[..., Sequence[float]], text: tuple[int, ...]) -> Distribution:
        return sampler.distribution(
            np.array(logits((*PROMPT, *text)), dtype=np.float32), (*PROMPT, *text)
        )

    def program(rng: Rng) -> tuple[int, ...]:
        drafted: tuple[int, ...] = ()
        probs = []
        for _ in range(2):
            probs.append(dist(other, drafted))
            drafted = (*drafted, draw(probs[-1], rng))
        rule = block_rejection if block else rejection
        verdict = rule(Draft(drafted, tuple(probs)), lambda i: dist(target, drafted[:i]), rng)
        text = verdict.tokens
        # The rest of three places is drawn from the target, so that the law is one over triples.
        while len(text) < 3:
            text = (*text, draw(dist(target, text), rng))
        return text

    law = enumerate_law(program)
    assert sum(law.values()) == pytest.approx(1)
    assert distance(law, target_law(params, n_vocab, 3)) < 1e-12


@block_or_token
@pytest.mark.parametrize("name", LAWS)
def test_law_of_three_tokens_of_the_loop_by_enumeration(name: str, block: bool) -> None:
    """The prompt's round, and three tokens after it, two of them drafted in one round."""
    params, n_vocab = LAWS[name], 3 if LAWS[name].logit_bias == {} else 5
    law = loop_law(params, n_vocab, n_predict=4, n_draft=2, block=block)
    assert distance(law, target_law(params, n_vocab, 4)) < 1e-12


@block_or_token
def test_law_where_the_draft_length_depends_on_the_draft(block: bool) -> None:
    law = loop_law(PLAIN, 3, n_predict=4, n_draft=2, block=block, p_min=0.45)
    assert distance(law, target_law(PLAIN, 3, 4)) < 1e-12


def test_the_enumerated_loops_draft_two_tokens_in_a_round() -> None:
    for params, n_vocab in ((PLAIN, 3), (FAULT_PARAMS, N_FAULT_VOCAB)):
        rounds = list(
            run(engine(n_vocab), model_drafter(n_vocab), params=params, n_predict=4, n_draft=2)
        )
        assert max(r.n_draft for r in rounds) == 2


@block_or_token
def test_law_when_a_draft_row_is_bad(block: bool) -> None:
    """What was drawn before a row of NaN stays: to drop it would change the law of the text.

    https://github.com/ggml-org/llama.cpp/issues/23606
    """
    logits = table_logits(3, 7, blend=0.3)
    bad = [math.nan] * 3

    def draft_logits(tokens: tuple[int, ...]) -> Sequence[float]:
        return bad if len(tokens) == 5 and tokens[-1] == 0 else logits(tokens)

    def program(rng: Rng) -> tuple[int, ...]:
        drafter = ModelDrafter(FakeSequence(draft_logits, vocab(3)), 3)
        rounds = run(engine(3), drafter, params=PLAIN, n_predict=4, n_draft=2, rng=rng, block=block)
        return tuple(tokens_of(list(rounds)))

    assert distance(enumerate_law(program), target_law(PLAIN, 3, 4)) < 1e-12


@block_or_token
def test_law_when_a_target_row_is_bad(block: bool) -> None:
    """The text fails exactly if it reaches that row, and has read what the target alone reads."""
    logits = table_logits(3, 7)
    bad = [math.nan] * 3

    def target_logits(tokens: tuple[int, ...]) -> Sequence[float]:
        return bad if len(tokens) >= 5 and tokens[-1] == 1 else logits(tokens)

    def law(drafter: Callable[[], Drafter]) -> dict[tuple[int | str, ...], float]:
        def program(rng: Rng) -> tuple[int | str, ...]:
            target = FakeSequence(target_logits, vocab(3))
            text: list[int | str] = []
            try:
                for round in run(
                    target, drafter(), params=PLAIN, n_predict=4, n_draft=2, rng=rng, block=block
                ):
                    text += round.tokens
            except LogitsError:
                text.append("error")
            return tuple(text)

        return enumerate_law(program)

    alone = law(NoDrafter)
    assert 0.2 < sum(weight for text, weight in alone.items() if text[-1] == "error") < 0.8
    assert distance(law(lambda: model_drafter(3)), alone) < 1e-12


@block_or_token
def test_law_of_repetitions_and_the_model_together(block: bool) -> None:
    """Which of the two drafts, and how far, depends on the text and on the draft before."""
    sources = set()

    def program(rng: Rng) -> tuple[int, ...]:
        drafter = HybridDrafter(NgramDrafter(), model_drafter(3))
        rounds = list(
            run(
                engine(3),
                drafter,
                params=PLAIN,
                n_predict=4,
                n_draft=2,
                rng=rng,
                block=block,
                p_min=0.35,
                prompt=(1, 0, 2, 0, 1, 0),
            )
        )
        sources.update(round.source for round in rounds if round.n_draft)
        return tuple(tokens_of(rounds))

    law = enumerate_law(program)
    assert sources == {"ngram", "model"}
    assert distance(law, target_law(PLAIN, 3, 4, prompt=(1, 0, 2, 0, 1, 0))) < 1e-12


@block_or_token
def test_law_with_a_point_mass_drafter(block: bool) -> None:
    """Tokens that were not drawn at all are accepted with p, else excluded."""

    def program(rng: Rng) -> tuple[int, ...]:
        drafter = ScriptedDrafter(lambda context: [1, 2])
        rounds = run(engine(3), drafter, params=PLAIN, n_predict=4, n_draft=2, rng=rng, block=block)
        return tuple(tokens_of(list(rounds)))

    assert distance(enumerate_law(program), target_law(PLAIN, 3, 4)) < 1e-12


DRY_PROMPT = (2, 0, 1, 0, 0)


class NeverTwice:
    """A processor with state kept by prefix: no token may follow itself."""

    def __init__(self) -> None:
        self._banned: dict[tuple[int, ...], int] = {}

    def __call__(self, row: Row, history: History) -> Row:
        prefix = tuple(history.last(-1))
        row[self._banned.setdefault(prefix, prefix[-1])] = -np.inf
        return row


@block_or_token
def test_law_under_dry(block: bool) -> None:
    """The penalty sees the draft tokens before a row, on the target's side and the draft's."""
    params = replace(PLAIN, dry_multiplier=0.8, dry_allowed_length=1, dry_penalty_last_n=-1)
    breakers = {2: ((),)}

    def program(rng: Rng) -> tuple[int, ...]:
        how = {"n_predict": 4, "n_draft": 2, "block": block, "prompt": DRY_PROMPT}
        rounds = run(engine(3), model_drafter(3), params=params, rng=rng, breakers=breakers, **how)
        return tuple(tokens_of(list(rounds)))

    law = target_law(params, 3, 4, DRY_PROMPT, breakers=breakers)
    assert distance(enumerate_law(program), law) < 1e-12
    assert distance(law, target_law(PLAIN, 3, 4, DRY_PROMPT)) > 0.05


@block_or_token
def test_law_under_a_processor_of_ones_own(block: bool) -> None:
    """Target and draft go through the same processor, with a state of the same prefix."""

    def program(rng: Rng) -> tuple[int, ...]:
        rounds = run(
            engine(3),
            model_drafter(3),
            params=PLAIN,
            n_predict=4,
            n_draft=2,
            rng=rng,
            block=block,
            processors=[NeverTwice()],
        )
        return tuple(tokens_of(list(rounds)))

    law = enumerate_law(program)
    assert distance(law, target_law(PLAIN, 3, 4, processors=[NeverTwice()])) < 1e-12
    assert all(a != b for text in law for a, b in pairwise(text))


# Faults: each must be caught by the very test that the right code passes.
# Three tokens of five may follow, so that each fault has a place to show: a token outside the
# target's three, a residual whose lists of candidates differ, a draft with another temperature.

N_FAULT_VOCAB = 5


class _Claims(ModelDrafter):
    """Draws as it should, but claims another q."""

    claimed: SamplingParams

    def draft(self, context, gate, sampler, rng):  # type: ignore[no-untyped-def]
        draft = super().draft(context, gate, sampler, rng)
        claim = Sampler(self.claimed, N_FAULT_VOCAB)
        logits = table_logits(N_FAULT_VOCAB, 7, blend=0.3)
        texts = [(*context, *draft.tokens[:i]) for i in range(len(draft.tokens))]
        probs = [claim.distribution(np.array(logits(t), dtype=np.float32), t) for t in texts]
        return Draft(draft.tokens, tuple(probs), draft.source)


class _DropsUnlikely(ModelDrafter):
    """Ends its draft before the first token that its q finds unlikely: after it was drawn."""

    def draft(self, context, gate, sampler, rng):  # type: ignore[no-untyped-def]
        draft = super().draft(context, gate, sampler, rng)
        probs = draft.probs or ()
        likely = [q.prob(token) >= 0.3 for token, q in zip(draft.tokens, probs, strict=True)]
        n = [*likely, False].index(False)
        return Draft(draft.tokens[:n], probs[:n], draft.source)


class _DrawnBefore:
    """A proposal that is drawn before its gate is asked, and as sure as q is of that token."""

    def __init__(self, probs: Distribution, rng: Rng) -> None:
        self.probs = probs
        self._token = draw(probs, rng)

    @property
    def confidence(self) -> float:
        return self.probs.prob(self._token)

    def token(self, rng: Rng) -> int:
        return self._token


class _WrongTemperature(_Claims):
    claimed = SamplingParams(temperature=2.5, top_k=3, top_p=1, min_p=0)


class _Untruncated(_Claims):
    claimed = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


def _no_residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    return p


def _shifted_residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """Subtracts the candidate lists place by place, one place off."""
    n = min(len(p.probs), len(q.probs))
    rest = weight * p.probs
    rest[:n] = np.maximum(rest[:n] - np.roll(q.probs, 1)[:n], 0)
    return Distribution(rest / rest.sum(), p.ids) if rest.sum() else p


def _mean_accepted(
    rule: Callable[..., Verdict], p: Sequence[Distribution], q: Sequence[Distribution]
) -> float:
    def program(rng: Rng) -> int:
        draft = Draft(tuple(draw(d, rng) for d in q), tuple(q))
        return rule(draft, lambda i: p[i], rng).n_accepted

    return sum(n * weight for n, weight in enumerate_law(program).items())


def test_block_verification_never_accepts_fewer() -> None:
    """Expected number of accepted tokens, exactly, over many random pairs; sometimes more."""
    gains = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        p = [Distribution(x) for x in rng.dirichlet([0.5] * 4, size=4)]
        q = [Distribution(x) for x in rng.dirichlet([0.5] * 4, size=3)]
        gains.append(_mean_accepted(block_rejection, p, q) - _mean_accepted(rejection, p, q))
    assert min(gains) > -1e-12
    assert max(gains) > 0.01


FAULTS = [
    "none",
    "accept-always",
    "no residual",
    "wrong-temperature q",
    "untruncated q",
    "shifted residual",
    "dropped after the draw",
    "a gate that sees the draw",
]
FAULT_PARAMS = SamplingParams(temperature=1, top_k=3, top_p=1, min_p=0)


def _plant(
    fault: str, block: bool, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Rng], tuple[int, ...]]:
    """The loop over four tokens with one fault in it."""
    if fault == "no residual":
        monkeypatch.setattr(acceptance, "residual", _no_residual)
    if fault == "shifted residual":
        monkeypatch.setattr(acceptance, "residual", _shifted_residual)
    make = {
        "wrong-temperature q": _WrongTemperature,
        "untruncated q": _Untruncated,
        "dropped after the draw": _DropsUnlikely,
    }.get(fault, ModelDrafter)
    sees_the_draw = fault == "a gate that sees the draw"

    def program(rng: Rng) -> tuple[int, ...]:
        if fault == "accept-always":
            monkeypatch.setattr(rng, "accept", lambda probability: True)
        if sees_the_draw:
            monkeypatch.setattr(
                Sampler, "propose", lambda self, *row: _DrawnBefore(self.distribution(*row), rng)
            )
        drafter = make(engine(N_FAULT_VOCAB, 0.3), N_FAULT_VOCAB)
        rounds = run(
            engine(N_FAULT_VOCAB),
            drafter,
            params=FAULT_PARAMS,
            n_predict=4,
            n_draft=2,
            rng=rng,
            block=block,
            p_min=0.3 if sees_the_draw else 0.0,
        )
        return tuple(tokens_of(list(rounds)))

    return program


@block_or_token
@pytest.mark.parametrize("fault", FAULTS)
def test_enumeration_catches_planted_faults(
    fault: str, block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = enumerate_law(_plant(fault, block, monkeypatch))
    off = distance(law, target_law(FAULT_PARAMS, N_FAULT_VOCAB, 4))
    assert off < 1e-12 if fault == "none" else off > 1e-3


@block_or_token
@pytest.mark.parametrize("fault", FAULTS)
def test_chi_square_catches_planted_faults(
    fault: str, block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _plant(fault, block, monkeypatch)
    # The seeds are fixed, so the outcome is certain: with 2000 texts the fault that is hardest to
    # see gives 1e-13, and the right code 0.3 and 0.8.
    texts = [program(SeededRng(seed)) for seed in range(2000)]
    p_value = chi_square(texts, target_law(FAULT_PARAMS, N_FAULT_VOCAB, 4))
    assert p_value > 1e-3 if fault == "none" else p_value < 1e-6


@block_or_token
@pytest.mark.parametrize("name", LAWS)
def test_chi_square_of_the_loop(name: str, block: bool) -> None:
    params, n_vocab = LAWS[name], 6

    def texts() -> Iterator[tuple[int, ...]]:
        for seed in range(1500):  # enough for every planted fault below 1e-11 (the test above)
            rounds = run(
                engine(n_vocab),
                model_drafter(n_vocab),
                params=params,
                n_predict=4,
                n_draft=2,
                rng=SeededRng(seed),
                block=block,
            )
            yield tuple(tokens_of(list(rounds))[:4])

    assert chi_square(list(texts()), target_law(params, n_vocab, 4)) > 1e-3


def chi_square(texts: Sequence[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """P-value of Pearson's test; cells with few expected counts are pooled."""
    counts = Counter(texts)
    if any(text not in law for text in counts):
        return 0.0
    cells, rest = [], [0.0, 0.0]
    for text, weight in law.items():
        expected = weight * len(texts)
        if expected >= 5:
            cells.append((counts[text], expected))
        else:
            rest = [rest[0] + counts[text], rest[1] + expected]
    if rest[1] >= 5:
        cells.append((rest[0], rest[1]))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    # Wilson and Hilferty 1931: the cube root of chi-square over its mean is close to normal.
    k = len(cells) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return math.erfc(z / math.sqrt(2)) / 2


@pytest.mark.parametrize("n_draft", [1, 2, 4, 7])
def test_greedy_equals_the_target_alone(n_draft: int) -> None:
    alone = tokens_of(list(run(engine(), ScriptedDrafter(lambda c: []), n_predict=200)))
    drafted = list(run(engine(), model_drafter(), n_predict=200, n_draft=n_draft))
    assert tokens_of(drafted) == alone
    assert 0 < sum(r.n_accepted for r in drafted) < sum(r.n_draft for r in drafted)


def test_greedy_builds_no_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("probabilities were built")

    monkeypatch.setattr(Sampler, "distribution", refuse)
    assert len(tokens_of(list(run(engine(), model_drafter(), params=GREEDY)))) == 32


def test_the_sampled_path_samples() -> None:
    """Not the argmax in disguise: many seeds give many first tokens."""
    firsts = {
        tokens_of(
            list(run(engine(), model_drafter(), params=PLAIN, n_predict=1, rng=SeededRng(seed)))
        )[0]
        for seed in range(200)
    }
    assert len(firsts) > 3


def test_another_seed_gives_another_text_and_the_same_seed_the_same() -> None:
    def text(seed: int) -> list[int]:
        return tokens_of(list(run(engine(), model_drafter(), params=PLAIN, rng=SeededRng(seed))))

    assert text(3) == text(3) != text(4)


BIASED = SamplingParams(
    temperature=1, top_k=0, top_p=1, min_p=0, presence_penalty=0.5, logit_bias={2: 1.0}
)


@pytest.mark.parametrize("params", [PLAIN, BIASED], ids=["plain", "bias and penalty"])
@pytest.mark.parametrize("n_draft_vocab", [2, 5])
def test_vocabularies_of_different_size(n_draft_vocab: int, params: SamplingParams) -> None:
    """A draft with more tokens never proposes one that the target lacks; with fewer, none breaks."""
    logits = table_logits(3, 7, blend=0.3)
    other = FakeSequence(lambda t: [*logits(t), 9.0, 9.0][:n_draft_vocab], vocab(n_draft_vocab))

    def program(rng: Rng) -> tuple[int, ...]:
        drafter = ModelDrafter(other, 3)
        rounds = run(
            engine(3), drafter, params=params, n_predict=4, n_draft=2, rng=rng, prompt=(1, 0, 1)
        )
        return tuple(tokens_of(list(rounds)))

    assert distance(enumerate_law(program), target_law(params, 3, 4, prompt=(1, 0, 1))) < 1e-12
    assert max(other.tokens, default=0) < n_draft_vocab
