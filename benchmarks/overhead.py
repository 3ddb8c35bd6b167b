"""Time outside llama_decode as a share of a run, on the large rig, greedy and sampled.

python benchmarks/overhead.py [--n-predict 128]
"""

from __future__ import annotations

import argparse
import json
import os
import time

from rig import rig

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams

PROMPT = "Write a Python function that merges two sorted lists, and explain it."
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "llama.cpp's defaults": SamplingParams(),
    "temperature 1, no truncation": SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-predict", type=int, default=128, help="tokens of a text at most")
    n_predict = parser.parse_args().n_predict
    print(f"load {os.getloadavg()[0]:.2f}")
    with Pair(PairSpec.of(rig("large"), rig("large", "Q4_K_M"), EngineParams(n_ctx=1024))) as pair:
        for name, sampling in SAMPLING.items():
            before = sum(context.decode_s for context in pair.contexts)
            started = time.perf_counter()
            text = pair.generate(
                PROMPT, sampling, DecodeParams(n_predict=n_predict, seed=1, draft_policy="fixed")
            )
            text.read()
            wall_s = time.perf_counter() - started
            decode_s = sum(context.decode_s for context in pair.contexts) - before
            summary = text.summary
            figures = {
                "sampling": name,
                "n_tokens": summary.n_tokens,
                "outside_share": round(1 - decode_s / wall_s, 4),
                "speedup": round(summary.speedup or 0, 3),
                "alpha": round(summary.alpha or 0, 3),
                "c": round(summary.c or 0, 3),
                "v": {n: round(v, 2) for n, v in summary.v.items()},
            }
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
