"""Small fake models, rounds and laws that several tests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from qdraft.decoding.constraint import Constraint
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import Drafter
from qdraft.decoding.dry import Breakers
from qdraft.decoding.gumbel import GumbelNoise
from qdraft.decoding.loop import Decoding, Reader, TokenReader
from qdraft.decoding.policy.schedule import FixedSchedule, Schedule
from qdraft.decoding.records import Draft, Origin, Round, SamplingParams, Times, Verdict
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Processor, Sampler
from qdraft.testing import FakeClock, FakeSequence, FakeVocab, LogitsFn

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
PROMPT = (1, 0, 2)


def vocab(n: int, end: Sequence[int] = ()) -> FakeVocab:
    return FakeVocab([b"<%d>" % i for i in range(n)], end=end)


def table_logits(n_vocab: int, seed: int, scale: float = 1.5, blend: float = 0.0) -> LogitsFn:
    """Logits that depend on the last two tokens; ``blend`` adds noise from another seed."""

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        key = (*tokens[-2:], len(tokens) % 3)
        base, noise = normal(n_vocab, seed, *key), normal(n_vocab, seed + 1, *key)
        return scale * ((1 - blend) * base + blend * noise)

    return logits


@cache
def normal(n: int, *seed: int) -> np.ndarray:
    """Normal numbers of this seed, remembered: a loop asks for the same row many times."""
    return np.random.default_rng(seed).normal(size=n)


def engine(n_vocab: int = 8, blend: float = 0.0, **kwargs: object) -> FakeSequence:
    end = kwargs.pop("end", ())
    return FakeSequence(table_logits(n_vocab, 7, blend=blend), vocab(n_vocab, end), **kwargs)  # type: ignore[arg-type]


def model_drafter(n_vocab: int = 8, blend: float = 0.3, **kwargs: object) -> ModelDrafter:
    return ModelDrafter(engine(n_vocab, blend, **kwargs), n_vocab)


def run(
    target: FakeSequence,
    drafter: Drafter,
    *,
    params: SamplingParams = GREEDY,
    n_predict: int = 32,
    n_draft: int = 4,
    plain_every: int = 0,
    p_min: float = 0.0,
    block: bool = False,
    schedule: Schedule | None = None,
    prompt: Sequence[int] = PROMPT,
    rng: Rng | None = None,
    reader: Reader | None = None,
    processors: Sequence[Processor] = (),
    gumbel: GumbelNoise | None = None,
    breakers: Breakers | None = None,
    constraint: Constraint | None = None,
) -> Iterator[Round]:
    rule = "block" if block else "token"
    decoding = Decoding(
        target,
        drafter,
        prompt,
        Sampler(params, target.vocab.n_tokens, processors, gumbel, breakers, constraint),
        schedule or FixedSchedule(n_draft, p_min, plain_every),
        rng or SeededRng(1),
        FakeClock(),
        reader or TokenReader(),
        n_predict,
        rule if gumbel is None else "coupled",
    )
    return iter(decoding)


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]


def make_round(
    n_draft: int,
    n_accepted: int,
    *,
    draft_s: float = 0.0,
    verify_s: float = 1.0,
    source: str = "model",
    n_draft_rows: int | None = None,
    n_caught_up: int = 0,
    tokens: tuple[int, ...] | None = None,
    n_prompt: int = 0,
    index: int = 1,
) -> Round:
    """A round with these counts and times; its tokens are all 1 unless given."""
    n_rows = n_draft if n_draft_rows is None else n_draft_rows
    draft = Draft((1,) * n_draft, None, source, (0.5,) * n_draft, n_rows, n_caught_up)
    decided = (1,) * (n_accepted + 1) if tokens is None else tokens
    verdict = Verdict(decided, n_accepted + (n_accepted < n_draft), Origin.TARGET)
    times = Times(draft_s, verify_s, 0.0)
    return Round(index, 10, n_prompt, draft, verdict, decided, None, times)


PROMPT_ROUND = make_round(0, 0, verify_s=9.0, n_prompt=5, index=0)


def target_law(
    params: SamplingParams,
    n_vocab: int,
    n_tokens: int,
    prompt: tuple[int, ...] = PROMPT,
    processors: Sequence[Processor] = (),
    breakers: Breakers | None = None,
) -> dict[tuple[int, ...], float]:
    """The law of the target alone, by multiplying its conditional distributions."""
    logits, sampler = table_logits(n_vocab, 7), Sampler(params, n_vocab, processors, None, breakers)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n_tokens):
        longer = {}
        for text, weight in law.items():
            context = (*prompt, *text)
            row = np.array(logits(context), dtype=np.float32)
            probs = sampler.distribution(row, context).dense(n_vocab)
            longer.update({(*text, t): weight * p for t, p in enumerate(probs) if p > 0})
        law = longer
    return law


def distance(law: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return sum(abs(law.get(k, 0) - other.get(k, 0)) for k in law.keys() | other.keys()) / 2


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
