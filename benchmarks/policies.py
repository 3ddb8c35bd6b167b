"""Compare the target alone, fixed draft lengths and cost-aware drafting, with own and shared KV.

One run on the large rig takes the policies in turn for each prompt, with fresh caches for each
text. It bans end-of-generation tokens, so that every text has the same length. The figure is total
tokens over total seconds, prompt included, as a ratio to the target alone.

    python benchmarks/policies.py --draft Q4_K_M --temperature 0 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rig import rig

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.rates import Counts, count
from qdraft.llama.native import library_version
from qdraft.session.generation import Generation

PROMPTS = {
    "code": "Write a Python function that sorts a list using quicksort.",
    "question": "What is the capital of France and what is it famous for?",
    "story": "Tell me a short story about a dragon who is afraid of fire.",
    "translation": "Translate to French: I would like a cup of tea, please.",
}
ALONE = "target alone"
POLICIES = {
    ALONE: DecodeParams(n_draft=0),
    "fixed 2": DecodeParams(draft_policy="fixed", n_draft=2),
    "fixed 4": DecodeParams(draft_policy="fixed", n_draft=4),
    "auto": DecodeParams(),
    "auto, token": DecodeParams(verification="token"),
}


@dataclass
class Total:
    """What the texts of one policy add up to; times in seconds."""

    n_tokens: int = 0
    seconds: float = 0.0
    counts: Counts = field(default_factory=Counts)
    ttft_s: float = 0.0

    def add(self, text: Generation, seconds: float) -> None:
        summary = text.summary
        self.n_tokens += len(text.tokens)
        self.seconds += seconds
        self.counts += count([r for r in text.rounds if not r.n_prompt])
        self.ttft_s += summary.ttft_s or 0.0

    @property
    def per_second(self) -> float:
        return self.n_tokens / self.seconds

    def figures(self, alone: float) -> dict[str, float]:
        """The ratio to ``alone`` tokens a second, the rates, and the mean time to first token."""
        return {
            "x": self.per_second / alone,
            "alpha": self.counts.alpha or 0.0,
            "draft_yield": self.counts.draft_yield or 0.0,
            "ttft_s": self.ttft_s / len(PROMPTS),
        }


def measure(pairs: dict[str, Pair], sampling: SamplingParams, n_predict: int) -> dict[str, Total]:
    """Write each prompt under each policy with each pair, in turn. Costs start unknown."""
    for pair in pairs.values():  # a short text brings the weights into memory
        pair.generate("Hi", sampling, DecodeParams(n_predict=8, n_draft=0)).read()
    totals: dict[str, Total] = {}
    for prompt in PROMPTS.values():
        for kv, pair in pairs.items():
            for policy, params in POLICIES.items():
                if kv == "own" and policy == ALONE:
                    continue
                started = time.perf_counter()
                text = pair.generate(prompt, sampling, replace(params, n_predict=n_predict, seed=1))
                text.read()
                seconds = time.perf_counter() - started
                name = policy if policy == ALONE else f"{policy}, {kv} KV"
                totals.setdefault(name, Total()).add(text, seconds)
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", default="Q4_K_M", help="file type of the draft")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--n-predict", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    endless = dict.fromkeys((0, 2, 4), -float("inf"))
    sampling = SamplingParams(args.temperature, top_k=0, top_p=1, min_p=0, logit_bias=endless)
    params = EngineParams(n_ctx=1024)
    load = os.getloadavg()[0]
    files = (rig("large"), rig("large", args.draft))
    with (
        Pair(PairSpec.of(*files, params, share_kv="off")) as own,
        Pair(PairSpec.of(*files, params, share_kv="on")) as shared,
    ):
        totals = measure({"own": own, "shared": shared}, sampling, args.n_predict)
        costs = shared.learned.costs.medians()
    alone = totals[ALONE].per_second
    figures = {name: total.figures(alone) for name, total in totals.items()}
    print(f"F16 + {args.draft}, temperature {args.temperature}, {args.n_predict} tokens")
    print(f"load {load:.2f}, target alone {alone:.1f} t/s, {library_version()}")
    for name, row in figures.items():
        rates = f"alpha {row['alpha']:.3f}  yield {row['draft_yield']:.3f}"
        print(f"{name:<24} x {row['x']:.2f}  {rates}  first token {row['ttft_s']:.2f} s")
    widths = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in costs.v.items())
    print(f"c {costs.c.get('model', 0):.2f}, v {widths}")
    if args.json:
        report = {"figures": figures, "costs": asdict(costs)}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
