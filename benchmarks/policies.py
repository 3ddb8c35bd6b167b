"""Target alone, fixed draft length and cost-aware drafting, with own and with shared KV.

Interleaved per prompt in one run on the large rig, caches fresh for each text, end-of-generation
tokens banned so that every text has the same length. Total tokens over total seconds, prompt
included, as a ratio to the target alone.

    python benchmarks/policies.py --draft Q4_K_M --temperature 0 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from rig import rig

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.policy.learned import Learned
from qdraft.llama.native import library_version

PROMPTS = {
    "code": "Write a Python function that sorts a list using quicksort.",
    "question": "What is the capital of France and what is it famous for?",
    "story": "Tell me a short story about a dragon who is afraid of fire.",
    "translation": "Translate to French: I would like a cup of tea, please.",
}
POLICIES = {
    "target alone": DecodeParams(n_draft=0),
    "fixed 2": DecodeParams(draft_policy="fixed", n_draft=2),
    "fixed 4": DecodeParams(draft_policy="fixed", n_draft=4),
    "auto": DecodeParams(),
    "auto, block": DecodeParams(verification="block"),
}


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
    totals: dict[str, list[float]] = {}
    figures: dict[str, dict[str, float]] = {}
    load = os.getloadavg()[0]
    files = (rig("large"), rig("large", args.draft))
    with (
        Pair(PairSpec.of(*files, params, share_kv="off")) as own,
        Pair(PairSpec.of(*files, params, share_kv="on")) as shared,
    ):
        for pair in (own, shared):  # nothing known of costs, and weights in memory
            pair.learned = Learned()
            pair.generate("Hi", sampling, DecodeParams(n_predict=8, n_draft=0)).read()
        for prompt in PROMPTS.values():
            for kv, pair in (("own", own), ("shared", shared)):
                for policy, decode in POLICIES.items():
                    if kv == "own" and policy == "target alone":
                        continue
                    name = policy if policy == "target alone" else f"{policy}, {kv} KV"
                    decode = DecodeParams(
                        n_predict=args.n_predict, seed=1, n_draft=decode.n_draft,
                        draft_policy=decode.draft_policy, verification=decode.verification,
                    )  # fmt: skip
                    started = time.perf_counter()
                    text = pair.generate(prompt, sampling, decode)
                    text.read()
                    seconds = time.perf_counter() - started
                    total = totals.setdefault(name, [0, 0.0, 0, 0, 0, 0])
                    summary = text.summary
                    for i, x in enumerate(
                        (len(text.tokens), seconds, summary.n_accepted, summary.n_tested,
                         summary.n_drafted, summary.ttft_s or 0.0)
                    ):  # fmt: skip
                        total[i] += x
        alone = totals["target alone"][0] / totals["target alone"][1]
        for name, (tokens, seconds, accepted, tested, drafted, ttft_s) in totals.items():
            figures[name] = {
                "x": tokens / seconds / alone,
                "alpha": accepted / tested if tested else 0.0,
                "draft_yield": accepted / drafted if drafted else 0.0,
                "ttft_s": ttft_s / len(PROMPTS),
            }
        known = shared.learned.costs.medians()
    print(f"F16 + {args.draft}, temperature {args.temperature}, {args.n_predict} tokens")
    print(f"load {load:.2f}, target alone {alone:.1f} t/s, {library_version()}")
    for name, row in figures.items():
        print(f"{name:<24} x {row['x']:.2f}  " + f"alpha {row['alpha']:.3f}  "
              f"yield {row['draft_yield']:.3f}  first token {row['ttft_s']:.2f} s")  # fmt: skip
    print(
        f"c {known.c.get('model', 0):.2f}, v "
        + ", ".join(f"{n}: {x:.2f}" for n, x in known.v.items())
    )
    if args.json:
        costs = {"target_s": known.target_s, "c": known.c, "v": known.v}
        args.json.write_text(json.dumps({"figures": figures, "costs": costs}, indent=1))


if __name__ == "__main__":
    main()
