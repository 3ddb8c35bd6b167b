"""Each sampling step against an independent, slow and obvious version of it."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qdraft.decoding.records import Distribution, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import History, Row, Sampler
from qdraft.decoding.verification import residual
from qdraft.errors import LogitsError, UsageError
from qdraft.session.check import _margin

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def slow_probs(row: np.ndarray, params: SamplingParams, history: list[int]) -> np.ndarray:
    """llama.cpp's chain, one token at a time."""
    logits = {i: float(x) for i, x in enumerate(row)}
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    window = (
        history if params.repeat_last_n < 0 else history[-params.repeat_last_n or len(history) :]
    )
    for token in set(window) if params.repeat_last_n else ():
        x = logits[token]
        x = x / params.repeat_penalty if x > 0 else x * params.repeat_penalty
        logits[token] = x - window.count(token) * params.frequency_penalty - params.presence_penalty

    def normalised(temperature: float = 1.0) -> list[tuple[int, float]]:
        top = max(logits.values())
        weights = {i: math.exp((x - top) / temperature) for i, x in logits.items()}
        total = sum(weights.values())
        return sorted(((i, w / total) for i, w in weights.items()), key=lambda pair: -pair[1])

    def keep(tokens: list[int]) -> None:
        for token in set(logits) - set(tokens):
            del logits[token]

    def nucleus(ranked: list[tuple[int, float]], reached: Callable[[float], bool]) -> list[int]:
        kept, total = [], 0.0
        for token, p in ranked:
            kept.append(token)
            total += p
            if reached(total):
                break
        return kept

    if params.top_k:
        keep([i for i, _ in normalised()[: params.top_k]])
    if params.typical_p < 1:
        ranked = normalised()
        entropy = -sum(p * math.log(p) for _, p in ranked if p)
        ranked.sort(key=lambda q: abs(-math.log(q[1]) - entropy))
        keep(nucleus(ranked, lambda total: total > params.typical_p))
    if params.top_p < 1:
        keep(nucleus(normalised(), lambda total: total >= params.top_p))
    if params.min_p:
        ranked = normalised()
        keep([i for i, p in ranked if p >= params.min_p * ranked[0][1]])
    out = np.zeros(len(row))
    for token, p in normalised(params.temperature):
        out[token] = p
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"typical_p": 0.5},
        {"repeat_penalty": 1.3, "repeat_last_n": 4},
        {"repeat_penalty": 1.3, "repeat_last_n": -1},
        {"repeat_penalty": 1.3, "repeat_last_n": 0},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"logit_bias": {3: 2.5, 5: -math.inf}},
        {
            "top_k": 20,
            "top_p": 0.8,
            "min_p": 0.05,
            "typical_p": 0.9,
            "temperature": 0.8,
            "repeat_penalty": 1.1,
        },
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_distribution(changes: dict[str, object], seed: int) -> None:
    params = SamplingParams(**{**OFF, **changes})  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    row = rng.normal(size=60, scale=2).astype(np.float32)
    kept = row.copy()
    history = [int(t) for t in rng.integers(0, 12, size=20)]
    got = Sampler(params, 60).distribution(row, history[:-2], history[-2:])
    np.testing.assert_allclose(got.dense(60), slow_probs(row, params, history), atol=1e-6)
    assert got.probs.sum() == pytest.approx(1)
    np.testing.assert_array_equal(row, kept)  # rows are borrowed: never written to


def test_greedy_is_the_argmax_after_penalties() -> None:
    row = np.array([1.0, 3.0, 2.9], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0), 3).argmax(row, [1]) == 1
    assert Sampler(SamplingParams(temperature=0, presence_penalty=0.5), 3).argmax(row, [1]) == 2
    assert Sampler(SamplingParams(temperature=0, logit_bias={0: 9}), 3).argmax(row, [1]) == 0


def llama_cpp_candidates(
    row: np.ndarray, params: SamplingParams, history: list[int]
) -> dict[int, float]:
    """The logits that llama.cpp's own samplers leave, in the order of its default chain."""
    llama = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    n = len(row)
    biases = [llama.llama_logit_bias(token, bias) for token, bias in params.logit_bias.items()]
    penalties = llama.llama_sampler_init_penalties(
        n,
        len(history) if params.repeat_last_n < 0 else params.repeat_last_n,
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )
    for token in history:
        llama.llama_sampler_accept(penalties, token)
    assert params.xtc_probability in (0, 1)  # else llama.cpp tosses a coin
    chain = (
        llama.llama_sampler_init_logit_bias(
            n, len(biases), (llama.llama_logit_bias * len(biases))(*biases)
        ),
        penalties,
        llama.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        llama.llama_sampler_init_top_k(params.top_k),
        llama.llama_sampler_init_typical(params.typical_p, 0),
        llama.llama_sampler_init_top_p(params.top_p, 0),
        llama.llama_sampler_init_min_p(params.min_p, 0),
        llama.llama_sampler_init_xtc(params.xtc_probability, params.xtc_threshold, 0, 1),
        llama.llama_sampler_init_temp_ext(
            params.temperature, params.dynatemp_range, params.dynatemp_exp
        ),
    )
    data = (llama.llama_token_data * n)(*((i, float(x), 0.0) for i, x in enumerate(row)))
    array = llama.llama_token_data_array(data, n, -1, False)
    for sampler in chain:
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
        llama.llama_sampler_free(sampler)
    left = [array.data[i] for i in range(array.size)]
    return {entry.id: entry.logit for entry in left if entry.logit > -math.inf}


CHAINS = (
    {"typical_p": 0.5},
    {"typical_p": 0.2, "top_k": 0},
    {"typical_p": 0.4, "top_k": 5},
    {"typical_p": 0.5, "top_k": 1},
    {"typical_p": 0.4, "top_k": 8, "top_p": 0.7, "min_p": 0.3},
    {"top_k": 1},
    {"top_k": 0, "top_p": 0.3},
    {"top_k": 0, "top_p": 1.0, "min_p": 1.0},
    {"repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repeat_penalty": 1.5, "repeat_last_n": 3, "typical_p": 0.6},
    {"repeat_penalty": 0.7, "repeat_last_n": -1},
    {"logit_bias": {3: 4.0, 7: -2.5}},
    {"logit_bias": {3: 4.0}, "typical_p": 0.3, "presence_penalty": 2.0},
    {"top_n_sigma": 1.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0},
    {"top_n_sigma": 0.5, "logit_bias": {3: -math.inf}},
)
# Steps that choose at random, or with a temperature, also at temperature 0.
HOT_CHAINS = (
    {"xtc_probability": 1.0, "top_k": 0, "min_p": 0.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 1.0, "xtc_threshold": 0.5},
    {"dynatemp_range": 0.5},
    {"dynatemp_range": 3.0, "dynatemp_exp": 2.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0},
    {"dynatemp_range": 0.4, "top_k": 1},
    {"dynatemp_range": 0.6, "top_n_sigma": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"dynatemp_range": 0.6, "xtc_probability": 1.0, "xtc_threshold": 0.05, "typical_p": 0.9},
)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("changes", HOT_CHAINS, ids=str)
def test_the_hot_steps_are_those_of_llama_cpp(
    changes: dict[str, object], temperature: float
) -> None:
    params = SamplingParams(**{"temperature": temperature, **changes})  # type: ignore[arg-type]
    assert not params.greedy
    sampler = Sampler(params, 40)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        row = rng.normal(size=40, scale=1 + seed % 4).astype(np.float32)
        logits = llama_cpp_candidates(row, params, [])
        theirs = np.zeros(40)
        theirs[list(logits)] = np.exp(np.array(list(logits.values())) - max(logits.values()))
        ours = sampler.distribution(row, []).dense(40)
        np.testing.assert_allclose(ours, theirs / theirs.sum(), atol=2e-5)


def test_xtc_is_the_mixture_of_both_outcomes_of_its_coin() -> None:
    row = np.random.default_rng(2).normal(size=20).astype(np.float32)
    plain = SamplingParams(temperature=1.2, top_k=8)
    dense = {
        p: Sampler(replace(plain, xtc_probability=p, xtc_threshold=0.05), 20)
        .distribution(row, [])
        .dense(20)
        for p in (0.0, 0.3, 1.0)
    }
    assert (dense[1.0] > 0).sum() < (dense[0.0] > 0).sum()
    np.testing.assert_allclose(dense[0.3], 0.7 * dense[0.0] + 0.3 * dense[1.0])


def test_a_threshold_above_one_half_switches_xtc_off() -> None:
    assert SamplingParams(temperature=0, xtc_probability=1, xtc_threshold=0.51).greedy


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("changes", CHAINS, ids=str)
def test_the_candidates_are_those_of_llama_cpps_own_chain(
    changes: dict[str, object], temperature: float
) -> None:
    """Greedy or sampled: the same tokens are left, in the same proportions."""
    params = SamplingParams(**{"temperature": temperature, **changes})  # type: ignore[arg-type]
    sampler, n_vocab = Sampler(params, 40), 40
    n_unlikely = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        row = rng.normal(size=n_vocab, scale=1 + seed % 4).astype(np.float32)
        history = [int(token) for token in rng.integers(0, 12, size=20)]
        logits = llama_cpp_candidates(row, params, history)
        if temperature == 0:
            (token,) = logits
            assert sampler.argmax(row, history[:-2], history[-2:]) == token
            proposal = sampler.propose(row, history)
            assert proposal.token(SeededRng(0)) == token
            assert 0 < proposal.confidence <= 1
            n_unlikely += token != sampler.process(row, history).argmax()
        else:
            theirs = np.zeros(n_vocab)
            theirs[list(logits)] = np.exp(np.array(list(logits.values())) - max(logits.values()))
            ours = sampler.distribution(row, history[:-2], history[-2:]).dense(n_vocab)
            np.testing.assert_allclose(ours, theirs / theirs.sum(), atol=1e-6)
    rules_out = temperature == 0 and params.typical_p < 1 and params.top_k != 1
    assert (n_unlikely > 0) == rules_out


def test_greedy_typical_p_may_rule_out_the_likeliest_token() -> None:
    """As in llama.cpp: five tokens of .11 are more typical than one of .45."""
    row = np.log(np.array([0.45, 0.11, 0.11, 0.11, 0.11, 0.11])).astype(np.float32)
    row[3] += 1e-3
    sampler = Sampler(SamplingParams(temperature=0, typical_p=0.5), 6)
    assert sampler.argmax(row, []) == 3
    proposal = sampler.propose(row, [])
    assert (proposal.token(SeededRng(0)), proposal.confidence_in(0)) == (3, 0)
    assert proposal.confidence == pytest.approx(0.2, abs=1e-3)
    # --check judges by the same tokens, and a fork has a margin that noise must explain
    assert _margin(sampler, row, [], 3) is None
    assert _margin(sampler, row, [], 0) == pytest.approx(math.log(45 / 11), abs=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_rows_are_errors(bad: float) -> None:
    row = np.array([0, bad, 1], dtype=np.float32)
    sampler = Sampler(SamplingParams(), 3)
    with pytest.raises(LogitsError):
        sampler.distribution(row, [])
    with pytest.raises(LogitsError):
        sampler.argmax(row, [])


def test_everything_banned_is_an_error() -> None:
    params = SamplingParams(logit_bias={0: -math.inf, 1: -math.inf})
    with pytest.raises(LogitsError, match="-inf"):
        Sampler(params, 2).distribution(np.zeros(2, dtype=np.float32), [])


def test_bias_beyond_the_vocabulary_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"token 7.*3 tokens"):
        Sampler(SamplingParams(logit_bias={7: 1.0}), 3)


def test_the_last_tokens_of_text_and_draft() -> None:
    history = History([1, 2, 3], [4, 5])
    assert len(history) == 5
    assert history.last(3) == [3, 4, 5]
    assert history.last(1) == [5]
    assert history.last(9) == history.last(-1) == [1, 2, 3, 4, 5]
    assert History([1, 2, 3]).last(0) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_sees_the_processors(temperature: float) -> None:
    """A banned favourite is not what the draft is sure of."""
    row = np.array([9.0, 2.0, 1.0], dtype=np.float32)
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1, min_p=0)
    banned = replace(params, logit_bias={0: -math.inf})
    assert Sampler(params, 3).propose(row, [1]).confidence > 0.99
    proposal = Sampler(banned, 3).propose(row, [1])
    assert proposal.confidence == pytest.approx(1 / (1 + math.exp(-1)), rel=1e-6)
    assert proposal.confidence_in(0) == 0
    penalised = Sampler(replace(params, presence_penalty=8.0), 3).propose(row, [1], [0])
    assert penalised.confidence == pytest.approx(1 / (2 + math.exp(-7)), rel=1e-6)  # 1, -6, 1


def test_proposals() -> None:
    row = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    likeliest = Sampler(SamplingParams(temperature=0), 3).propose(row, [1])
    assert (likeliest.probs, likeliest.token(SeededRng(0))) == (None, 1)
    assert likeliest.confidence_in(1) == likeliest.confidence
    assert likeliest.confidence_in(2) == 0
    sampler = Sampler(SamplingParams(temperature=1, top_k=2, top_p=1, min_p=0), 3)
    drawn = sampler.propose(row, [1])
    assert drawn.probs is not None
    assert drawn.confidence == drawn.confidence_in(1) == drawn.probs.prob(1)
    assert {drawn.token(SeededRng(i)) for i in range(40)} == {1, 2}
    with pytest.raises(LogitsError):
        Sampler(SamplingParams(temperature=0), 2).propose(np.full(2, np.nan, np.float32), [1])


class Once:
    """A processor with state: bans every token of the text, and keeps what it banned by prefix."""

    def __init__(self) -> None:
        self.n_banned: dict[tuple[int, ...], int] = {}

    def __call__(self, row: Row, history: History) -> Row:
        tokens = set(history.last(-1))
        self.n_banned[tuple(history.last(-1))] = len(tokens)
        row[list(tokens)] = -np.inf
        return row


def test_processors_of_ones_own_come_last_and_see_text_and_draft() -> None:
    once = Once()
    sampler = Sampler(SamplingParams(temperature=0, logit_bias={0: 99}), 4, [once])
    row = np.array([1.0, 3.0, 2.0, 0.0], dtype=np.float32)
    kept = row.copy()
    assert sampler.argmax(row, [1]) == 0
    assert sampler.propose(row, [1], [0]).token(SeededRng(0)) == 2
    assert once.n_banned == {(1,): 1, (1, 0): 2}
    np.testing.assert_array_equal(row, kept)


def test_without_processors_no_row_is_copied() -> None:
    row = np.zeros(4, dtype=np.float32)
    assert Sampler(SamplingParams(), 4).process(row, [1]) is row


def test_residual_of_different_supports() -> None:
    """Tokens are matched by id, not by place."""
    p = Distribution(np.array([0.5, 0.3, 0.2]), np.array([2, 5, 9]))
    q = Distribution(np.array([0.6, 0.4]), np.array([5, 7]))
    np.testing.assert_allclose(residual(p, q).dense(10)[[2, 5, 7, 9]], [5 / 7, 0, 0, 2 / 7])
    dense = Distribution(q.dense(10))
    np.testing.assert_allclose(residual(p, dense).dense(10), residual(p, q).dense(10))
    np.testing.assert_allclose(
        residual(Distribution(p.dense(10)), q).dense(10), residual(p, q).dense(10)
    )


def test_residual_of_equal_distributions_is_the_target() -> None:
    p = Distribution(np.array([0.5, 0.5]))
    assert residual(p, p) is p


def test_seeded_draws_follow_the_weights_and_never_hit_zero() -> None:
    rng = SeededRng(5)
    weights = np.array([0.0, 0.2, 0.0, 0.8, 0.0])
    draws = np.bincount([rng.draw(weights) for _ in range(5000)], minlength=5)
    assert draws[0] == draws[2] == draws[4] == 0
    assert draws[1] / 5000 == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("typical_p", 0.0),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("presence_penalty", math.nan),
        ("top_n_sigma", math.nan),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("dynatemp_range", -0.5),
        ("dynatemp_exp", math.inf),
        ("dry_multiplier", -1.0),
        ("dry_base", 0.9),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ("",)),
    ],
)
def test_invalid_values_are_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
