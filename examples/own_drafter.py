"""The loop with a drafter of one's own, on a fake sequence: no model needed.

The drafter guesses that the text continues as it did when its last two tokens occurred before.
Whatever it proposes, the emitted text is the target's.
"""

from collections.abc import Sequence

from qdraft.decoding.drafters.protocol import NoDrafter
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import SamplingParams
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.decoding.summary import summarize
from qdraft.testing import FakeClock, FakeSequence, FakeVocab, ScriptedDrafter

TEXT = [0, 1, 2, 3, 1, 2, 4]


def logits(tokens: tuple[int, ...]) -> list[float]:
    """A target that says TEXT over and over."""
    following = TEXT[len(tokens) % len(TEXT)]
    return [10.0 if token == following else 0.0 for token in range(5)]


def repeat(context: Sequence[int]) -> Sequence[int]:
    """What followed the latest earlier occurrence of the last two tokens."""
    for i in range(len(context) - 3, 0, -1):
        if list(context[i - 1 : i + 1]) == list(context[-2:]):
            return context[i + 1 :]
    return []


def generate(drafter: NoDrafter | ScriptedDrafter) -> tuple[list[int], float]:
    vocab = FakeVocab([b"a", b"b", b"c", b"d", b"e"])
    sampler = Sampler(SamplingParams(temperature=0), vocab.n_tokens)
    target, schedule = FakeSequence(logits, vocab), FixedSchedule(4, plain_every=0)
    decoding = Decoding(
        target, drafter, TEXT[:2], sampler, schedule, SeededRng(0), FakeClock(), n_predict=40
    )
    rounds = list(decoding)
    return [token for r in rounds for token in r.tokens], summarize(rounds).tau or 1.0


alone, _ = generate(NoDrafter())
drafted, tau = generate(ScriptedDrafter(repeat))
assert drafted == alone
print(f"the same {len(alone)} tokens with {tau:.1f} tokens a round")
