"""What a round costs on hybrid models, over the decodes that it consists of.

A hybrid has a recurrent state beside its KV cells. Taking back tokens costs it more than cutting a
cache: a state is kept, copied or read again. Two models with random weights, each target and draft
of itself, make rounds in which every draft token is accepted, and rounds in which none is. After
each round other contexts of the same weights repeat its decodes on texts that never go back: as
many, of the same widths. The overhead is the seconds of the rounds over those of these decodes.

    python benchmarks/hybrid.py                 # the bars
    python benchmarks/hybrid.py --json FILE     # all figures too

lfm2: 16 layers, 10 of them short convolutions; qwen35: 24 layers, 18 of them gated delta nets. Both
have 32,768 tokens of vocabulary, and weigh over 300 MB in Q8_0. They are built in the cache once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

from random_model import TOKENS, write_model

from qdraft import EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.protocol import Drafter, Verified
from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.loop import Decoding
from qdraft.decoding.policy.schedule import FixedSchedule
from qdraft.decoding.records import Draft, Round
from qdraft.decoding.rng import SeededRng
from qdraft.decoding.sampling import Sampler
from qdraft.host import default_threads
from qdraft.llama.context import LlamaContext
from qdraft.llama.quantize import Recipe, quantize
from qdraft.paths import cache_dir, scratch_folder
from qdraft.session.pair import Sequences
from qdraft.session.store import describe_machine

N_VOCAB = 1 << 15
N_CTX = 1024
# A text stays below 256 tokens. From 512 cells on, llama.cpp splits a single row over the threads,
# so that its rounding differs from that of a batch, and random weights have many near ties.
N_PROMPT = 16
FILE_TYPE = "Q8_0"
KEYS: dict[str, dict[str, Any]] = {
    "lfm2": {
        "context_length": 32768,
        "block_count": 16,
        "embedding_length": 1024,
        "feed_forward_length": 4608,
        "attention.head_count": 16,
        "attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": 3,
    },
    "qwen35": {
        "context_length": 32768,
        "block_count": 24,
        "embedding_length": 1024,
        "feed_forward_length": 3584,
        "attention.head_count": 8,
        "attention.head_count_kv": 2,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.freq_base": 1e7,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 2048,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 16,
        "ssm.group_count": 16,
    },
}
WANTED = {"accepted_overhead": "<= 1.05", "rejected_overhead": "<= 1.05", "draft_yield": ">= 0.95"}


@dataclass(frozen=True, slots=True)
class Timed:
    """One round: its seconds, those of its decodes repeated, and what it drafted.

    ``n_reread`` counts the rows that the target read again because its state had gone back further
    than the text.
    """

    seconds: float
    repeated_s: float
    n_draft: int
    n_accepted: int
    n_reread: int
    n_decodes: int


@dataclass(frozen=True, slots=True)
class Series:
    """The rounds of one model in which all draft tokens are ``accepted``, or none is."""

    model: str
    accepted: bool
    rounds: tuple[Timed, ...]

    @property
    def overhead(self) -> float:
        """Seconds of the rounds over those of their decodes: the median, for one is disturbed."""
        return quantiles([r.seconds / r.repeated_s for r in self.rounds], n=4)[1]

    @property
    def draft_yield(self) -> float:
        return sum(r.n_accepted for r in self.rounds) / sum(r.n_draft for r in self.rounds)


class Wrong:
    """A drafter whose tokens are never the target's: those of another, each replaced by the next.

    The target is greedy, and the other drafter is the target itself.
    """

    source = "model"

    def __init__(self, drafter: Drafter, n_vocab: int) -> None:
        self._drafter, self._n_vocab = drafter, n_vocab

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def draft(self, *arguments: Any) -> Draft:
        draft = self._drafter.draft(*arguments)
        tokens = tuple((token + 1) % self._n_vocab for token in draft.tokens)
        return Draft(tokens, None, draft.source, draft.confidence, draft.n_rows)

    def accept(self, verified: Verified) -> None:
        self._drafter.accept(verified)


class Decodes:
    """The decodes of a pair's contexts, as they happen: which model, and how wide."""

    def __init__(self, pair: Pair) -> None:
        self.seen: list[tuple[int, int, int]] = []
        for i, context in enumerate(pair.contexts):
            context.decode = self._watch(i, context.decode)  # type: ignore[method-assign]

    def _watch(self, i: int, decode: Callable[..., None]) -> Callable[..., None]:
        def watched(id: int, start: int, tokens: Sequence[int], logits: int, *rest: Any) -> None:
            self.seen.append((i, len(tokens), logits))
            decode(id, start, tokens, logits, *rest)

        return watched


class Repeater:
    """Repeats decodes on sequences that never go back, each a text that goes on."""

    def __init__(self, sequences: Sequence[TokenSequence], prompt: Sequence[int]) -> None:
        self._sequences, self._prompt = sequences, prompt
        self._tokens = [prompt[i % len(prompt)] for i in range(64)]

    def seconds(self, decodes: Sequence[tuple[int, int, int]], clock: Callable[[], float]) -> float:
        """Return the seconds of these decodes: the model of each, its tokens, and its rows."""
        n_most = sum(n for _, n, _ in decodes)
        for sequence in self._sequences:
            if not sequence.n_past or sequence.n_past + n_most > N_CTX // 4:
                sequence.truncate(0)
                sequence.eval(self._prompt, 0)
        started = clock()
        for i, n, logits in decodes:
            self._sequences[i].eval(self._tokens[:n], logits)
        return clock() - started


def model(name: str) -> Path:
    """The path of a model; builds it into the cache if it is missing."""
    path = cache_dir() / "hybrid" / f"{name}-{FILE_TYPE}.gguf"
    if not path.exists():
        tokens = [*TOKENS, *(f"w{i}" for i in range(N_VOCAB - len(TOKENS)))]
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(path.parent) as folder:
            wide = write_model(folder / f"{name}-F32", name, KEYS[name], tokens=tokens)
            quantize(wide, path, Recipe(FILE_TYPE), threads=default_threads())
    return path


def measure(pair: Pair, name: str, *, accepted: bool, n_draft: int, n_rounds: int) -> Series:
    """Make ``n_rounds`` rounds, and repeat the decodes of each."""
    decodes = Decodes(pair)
    prompt = [2 + (7 * i) % (N_VOCAB - 2) for i in range(N_PROMPT)]
    with pair.sequences() as own, ExitStack() as stack:
        others = [
            stack.enter_context(closing(LlamaContext(context.model, spec.params)))
            for context, spec in zip(pair.contexts, pair.spec.models, strict=True)
        ]
        repeater = Repeater([context.sequence() for context in others], prompt)
        rounds = _rounds_of(own, prompt, accepted=accepted, n_draft=n_draft)
        timed: list[Timed] = []
        while len(timed) < n_rounds + 2:
            decodes.seen.clear()
            started = time.perf_counter()
            round = next(rounds)
            seconds = time.perf_counter() - started
            seen = list(decodes.seen)
            repeated_s = repeater.seconds(seen, time.perf_counter)
            timed.append(_timed(round, seconds, repeated_s, len(seen)))
    # The first round reads the prompt, the second one warms up.
    return Series(name, accepted, tuple(timed[2:]))


def _timed(round: Round, seconds: float, repeated_s: float, n_decodes: int) -> Timed:
    return Timed(seconds, repeated_s, round.n_draft, round.n_accepted, round.n_reread, n_decodes)


def _rounds_of(
    own: Sequences, prompt: Sequence[int], *, accepted: bool, n_draft: int
) -> Iterator[Round]:
    """Give the rounds of greedy texts after ``prompt``, one after another."""
    assert own.draft is not None
    drafter: Drafter = ModelDrafter(own.draft, N_VOCAB, own.kv_copy)
    if not accepted:
        drafter = Wrong(drafter, N_VOCAB)
    sampler = Sampler(SamplingParams(temperature=0), N_VOCAB)
    yield from Decoding(
        own.target,
        drafter,
        prompt,
        sampler,
        FixedSchedule(n_draft, plain_every=0),
        SeededRng(0),
        time.perf_counter,
        n_predict=N_CTX // 4,
    )


def find_bars(series: Sequence[Series]) -> dict[str, float]:
    """The figures that ``WANTED`` names: the worst of all models."""
    return {
        "accepted_overhead": max(each.overhead for each in series if each.accepted),
        "rejected_overhead": max(each.overhead for each in series if not each.accepted),
        "draft_yield": min(each.draft_yield for each in series if each.accepted),
    }


def table(series: Sequence[Series], bars: dict[str, float]) -> str:
    """The series and the bars, in Markdown."""
    lines = [
        "| model | draft tokens | overhead | reread rows a round | draft yield |",
        "|---|---|---|---|---|",
    ]
    for each in series:
        n_reread = sum(r.n_reread for r in each.rounds) / len(each.rounds)
        kind = "accepted" if each.accepted else "rejected"
        lines.append(
            f"| {each.model} | {kind} | {each.overhead:.3f} | {n_reread:.1f} | "
            f"{each.draft_yield:.3f} |"
        )
    lines += ["", "| bar | figure | wanted |", "|---|---|---|"]
    lines += [f"| {name} | {x:.3f} | {WANTED[name]} |" for name, x in bars.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-draft", type=int, default=4, help="draft tokens of a round")
    parser.add_argument("--n-rounds", type=int, default=40, help="rounds of a series")
    parser.add_argument("--models", nargs="+", choices=KEYS, default=list(KEYS))
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    series: list[Series] = []
    shared: dict[str, Any] = {}
    for name in args.models:
        path = model(name)
        with Pair(PairSpec.of(path, path, EngineParams(n_ctx=2 * N_CTX))) as pair:
            shared[name] = {"n_bytes": path.stat().st_size, "kv": asdict(pair.kv)}
            series += [
                measure(pair, name, accepted=yes, n_draft=args.n_draft, n_rounds=args.n_rounds)
                for yes in (True, False)
            ]
    bars = find_bars(series)
    print(table(series, bars))
    if args.json:
        report = {
            "machine": {**describe_machine(), "threads": default_threads()},
            "models": shared,
            "n_draft": args.n_draft,
            "bars": bars,
            "series": [{**asdict(each), "overhead": each.overhead} for each in series],
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
