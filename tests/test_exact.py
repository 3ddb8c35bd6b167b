"""--exact: which verify batches equal one-token decoding, and texts that are then the target's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.render.run import describe_bit_identity
from qdraft.session import store as machine
from qdraft.session.bit_identity import DEPTHS, BitIdentity, probe_bit_identity
from qdraft.testing import FakeSequence, FakeVocab

GREEDY = SamplingParams(temperature=0)
PROMPTS = (
    "Tell me a long story about a lighthouse keeper who collects storms.",
    "Write a Python function that merges two sorted lists.",
    "Translate to German: The train leaves at seven.",
    "What is the capital of France, and what is it known for?",
    "Summarize: The council met on Monday. It spoke of roads, then of schools, and then adjourned.",
    "What is 17 times 23? Show each step.",
    "Name five trees and say where they grow.",
    "Why is the sea salty?",
    "Write a short poem about winter.",
    "Explain what a hash table is to a child.",
    "List the planets from the sun outwards.",
    "Describe how bread is made. " + "Go into detail about the dough. " * 8,
)


class NoisyEngine(FakeSequence):
    """Rows of batches wider than ``n_exact`` beyond ``depth`` tokens are off by a little.

    With ``in_cells`` the fault is not in these rows, but in what they leave for the next one.
    """

    def __init__(self, n_exact: int, depth: int = 0, *, in_cells: bool = False, n_ctx: int = 4096):
        vocab = FakeVocab([bytes([i]) for i in range(7)])
        super().__init__(lambda text: [sum(text) % 5 + i for i in range(7)], vocab, n_ctx=n_ctx)
        self._n_exact, self._depth, self._in_cells = n_exact, depth, in_cells
        self._spoilt = 0

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        bad = len(tokens) > self._n_exact and self.n_past >= self._depth and logits > 1
        rows = super().eval(tokens, logits)
        if self._in_cells:
            if bad:
                self._spoilt = self.n_past
            elif self._spoilt and self.n_past > self._spoilt:
                rows[0, 1] += 0.25
        elif bad:
            rows[-1, 1] += 0.25
        return rows

    def truncate(self, n_past: int) -> None:
        super().truncate(n_past)
        if n_past < self._spoilt:
            self._spoilt = 0


def test_all_widths_are_bit_identical() -> None:
    engine = NoisyEngine(n_exact=100)
    assert probe_bit_identity(engine, 8) == BitIdentity(8)
    assert engine.n_past == 0
    assert max(engine.widths) <= max(DEPTHS)


@pytest.mark.parametrize("in_cells", [False, True])
@pytest.mark.parametrize("n_exact", [1, 2, 5, 8])
def test_the_longest_draft_that_is_bit_identical(n_exact: int, in_cells: bool) -> None:
    # a draft of n tokens makes a batch of n + 1 rows
    probed = probe_bit_identity(NoisyEngine(n_exact, in_cells=in_cells), 8)
    assert probed == BitIdentity(n_exact - 1, DEPTHS[0], 0.25)


def test_a_fault_that_begins_deep_in_the_text_is_found() -> None:
    assert probe_bit_identity(NoisyEngine(1, depth=256), 8) == BitIdentity(0, 300, 0.25)
    assert probe_bit_identity(NoisyEngine(3, depth=256), 8) == BitIdentity(2, 300, 0.25)
    # a context that ends before it has nothing to fear
    assert probe_bit_identity(NoisyEngine(1, depth=256, n_ctx=256), 4) == BitIdentity(4)
    assert probe_bit_identity(NoisyEngine(9, n_ctx=16), 8).n_draft == 0


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "exact.json"
    assert machine.load_bit_identity(path) is None
    for probed in (BitIdentity(8), BitIdentity(0, 300, 0.25)):
        machine.save_bit_identity(path, probed)
        assert machine.load_bit_identity(path) == probed
    path.write_text('{"n_draft": -3, "depth": null, "difference": null}')
    assert machine.load_bit_identity(path) is None


def test_one_sentence_says_what_exact_does() -> None:
    assert "up to 8 tokens are bit-identical to decoding" in describe_bit_identity(BitIdentity(8))
    assert (
        "up to 4 tokens are bit-identical; rows of longer drafts differ by 0.05"
        in describe_bit_identity(BitIdentity(4, 24, 0.05))
    )
    deep = describe_bit_identity(BitIdentity(0, 300, 0.61))
    assert "target runs alone" in deep
    assert "-t 1" in deep
    assert "-t 1" not in describe_bit_identity(BitIdentity(0, 24, 0.05))


@pytest.fixture(scope="module")
def exact_pair(smollm2: tuple[Path, Path], source_file: Path) -> Iterator[Pair]:
    """A quantized target with a q8_0 cache and one thread: rows of small batches are exact."""
    params = EngineParams(n_ctx=1024, n_threads=1, cache_type_k="q8_0", cache_type_v="q8_0")
    with Pair(PairSpec.of(source_file, smollm2[1], params)) as pair:
        yield pair


@pytest.mark.real
def test_exact_texts_are_the_targets_own_token_for_token(exact_pair: Pair) -> None:
    """Every prompt, and two that end just before the edges of the cache view: 256 and 512 cells."""
    longest = exact_pair.bit_identity(8)
    assert longest.n_draft >= 4
    endless = SamplingParams(temperature=0, logit_bias=dict.fromkeys((0, 2, 4), -np.inf))
    drafted = 0
    vocab = exact_pair.vocab
    edges = {}
    for edge in (256, 512):
        prompt = PROMPTS[0]
        while len(vocab.tokenize(prompt)) < edge - 60:  # with the chat template 30 tokens more
            prompt += " Every storm has a name."
        edges[prompt] = edge
    for prompt in (*PROMPTS, *edges):
        n_predict = 32 if prompt in edges else 20
        exact = DecodeParams(n_predict=n_predict, draft_policy="fixed", n_draft=8, exact=True)
        text = exact_pair.generate(prompt, endless, exact)
        text.read()
        alone = exact_pair.generate(prompt, endless, DecodeParams(n_predict=n_predict, n_draft=0))
        alone.read()
        assert text.tokens == alone.tokens, prompt
        if prompt in edges:
            assert len(text.prompt) < edges[prompt] < len(text.prompt) + n_predict
        assert max(r.n_draft for r in text.rounds) <= longest.n_draft
        assert text.bit_identity == longest
        drafted += text.summary.n_accepted
    assert drafted > 100


@pytest.mark.real
def test_without_exact_batches_the_target_runs_alone(exact_pair: Pair, smollm2: tuple[Path, Path]):
    with Pair(PairSpec.of(*smollm2, EngineParams(n_ctx=1024))) as pair:
        target = pair.spec.models.target
        facts = machine.file_facts(target.path, target.params)
        path = machine.bit_identity_path(facts, 8, 1024)
        machine.save_bit_identity(path, BitIdentity(0, 24, 0.05))  # as on a CPU where F16 has none
        text = pair.generate("Hi", GREEDY, DecodeParams(n_predict=24, exact=True))
        text.read()
        assert text.bit_identity == BitIdentity(0, 24, 0.05)
        assert not text.summary.n_drafted
        path.unlink()
        found_now = pair.bit_identity(8)
        with pair.sequences() as opened:
            assert found_now == probe_bit_identity(opened.target, 8)
