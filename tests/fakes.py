"""Small fake models that several tests use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import Drafter
from qdraft.decoding.loop import Stop, decode
from qdraft.decoding.policy.schedule import FixedSchedule, Schedule
from qdraft.decoding.records import Round, SamplingParams
from qdraft.decoding.rng import Rng, SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.testing import FakeClock, FakeEngine, FakeVocab, LogitsFn

GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)
PROMPT = (1, 0, 2)


def vocab(n: int, end: Sequence[int] = ()) -> FakeVocab:
    return FakeVocab([b"<%d>" % i for i in range(n)], end=end)


def table_logits(n_vocab: int, seed: int, scale: float = 1.5, blend: float = 0.0) -> LogitsFn:
    """Logits that depend on the last two tokens; ``blend`` adds noise from another seed."""

    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        key = [*tokens[-2:], len(tokens) % 3]
        base = np.random.default_rng([seed, *key]).normal(size=n_vocab)
        noise = np.random.default_rng([seed + 1, *key]).normal(size=n_vocab)
        return scale * ((1 - blend) * base + blend * noise)

    return logits


def engine(n_vocab: int = 8, blend: float = 0.0, **kwargs: object) -> FakeEngine:
    end = kwargs.pop("end", ())
    return FakeEngine(table_logits(n_vocab, 7, blend=blend), vocab(n_vocab, end), **kwargs)  # type: ignore[arg-type]


def model_drafter(n_vocab: int = 8, blend: float = 0.3, **kwargs: object) -> ModelDrafter:
    return ModelDrafter(engine(n_vocab, blend, **kwargs), n_vocab)


def run(
    target: FakeEngine,
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
    stop: Stop = lambda token: None,
) -> Iterator[Round]:
    return decode(
        target,
        drafter,
        prompt,
        Sampler(params, target.vocab.n_tokens),
        schedule or FixedSchedule(n_draft, p_min, plain_every),
        rng or SeededRng(1),
        stop=stop,
        clock=FakeClock(),
        n_predict=n_predict,
        verify_block=block,
    )


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for r in rounds for token in r.tokens]
