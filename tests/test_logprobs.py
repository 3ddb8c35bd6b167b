"""Log-probabilities of emitted tokens: the target's own, whatever is drafted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fakes import GREEDY, PROMPT, engine, model_drafter, table_logits

from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.logprobs import Logprobs, logprobs_of
from qdraft.decoding.loop import Decoding, TokenReader
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import DecodeParams, Round, SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.errors import UsageError
from qdraft.testing import FakeClock


def write(drafter: Drafter, sampling: SamplingParams, n_logprobs: int) -> list[Round]:
    sampler = Sampler(sampling, 8, gumbel=GumbelNoise(3))
    return list(
        Decoding(
            engine(),
            drafter,
            PROMPT,
            sampler,
            FixedSchedule(3, 0.0),
            SeededRng(1),
            FakeClock(),
            TokenReader(),
            20,
            "coupled",
            n_logprobs,
        )
    )


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1.4, top_k=3, logit_bias={2: -3.0})]
)
def test_they_are_those_of_the_raw_rows_also_inside_a_block(sampling: SamplingParams) -> None:
    rounds = write(model_drafter(), sampling, 3)
    assert max(r.n_accepted for r in rounds) > 1
    assert min(r.n_accepted - r.n_draft for r in rounds) < 0
    text = list(PROMPT)
    for round in rounds:
        assert len(round.logprobs) == len(round.tokens)
        for token, logprobs in zip(round.tokens, round.logprobs, strict=True):
            row = np.array(table_logits(8, 7)(tuple(text)))
            expected = row - np.log(np.exp(row).sum())
            assert logprobs.logprob == pytest.approx(expected[token], abs=1e-5)
            order = np.argsort(-expected)[:3]
            assert [each for each, _ in logprobs.top] == order.tolist()
            assert [x for _, x in logprobs.top] == pytest.approx(expected[order], abs=1e-5)
            text.append(token)
    alone = write(NoDrafter(), sampling, 3)
    assert [x for r in alone for x in r.logprobs] == [x for r in rounds for x in r.logprobs]


def test_they_cost_nothing_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("log-probabilities were computed")

    monkeypatch.setattr("qdraft.decoding.loop.logprobs_of", refuse)
    assert all(r.logprobs == () for r in write(model_drafter(), GREEDY, 0))


def test_a_banned_token_and_few_tokens() -> None:
    row = np.array([0.0, -math.inf, 0.0], np.float32)
    half = pytest.approx(math.log(0.5))
    assert logprobs_of(row, 0, 1).top[0][1] == half
    assert logprobs_of(row, 1, 9) == Logprobs(-math.inf, ((0, half), (2, half), (1, -math.inf)))


def test_a_negative_number_is_an_error() -> None:
    with pytest.raises(UsageError, match="logprobs is -1"):
        DecodeParams(logprobs=-1)
