"""Whether a replay predicts what drafting does live: alpha and speed-up, both ways, on the rig.

Records the pair on six prompts. Then replays each way to draft, and runs it live on the same
prompts with other random numbers, beside the target alone.

    python benchmarks/replay.py [--size small] [--draft Q4_K_M] [--n-predict 96] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from rig import rig

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.study import bench
from qdraft.study.bench_rows import fold
from qdraft.study.prompts import built_in
from qdraft.study.replay import ReplayOptions, replay
from qdraft.study.tune import read_costs, record_pair

WAYS = {
    "fixed 2": DecodeParams(draft_policy="fixed", n_draft=2),
    "fixed 4": DecodeParams(draft_policy="fixed", n_draft=4),
    "auto": DecodeParams(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="size of the rig: small or large")
    parser.add_argument("--draft", default="Q4_K_M", help="file type of the draft")
    parser.add_argument("--n-predict", type=int, default=96, help="tokens of a text at most")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    args = parser.parse_args()
    rows = []
    with Pair(
        PairSpec.of(rig(args.size), rig(args.size, args.draft), EngineParams(n_ctx=1024))
    ) as pair:
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(temperature, top_k=0, top_p=1, min_p=0)
            recording = record_pair(pair, built_in(), [temperature], sampling, args.n_predict)
            costs = read_costs(recording)
            assert costs
            for name, params in WAYS.items():
                replayed = replay(recording, costs, sampling, params, ReplayOptions(repeats=4))
                way = replace(params, n_predict=args.n_predict, seed=77)
                samples = list(bench.measure(pair, built_in(), [sampling], way))
                live = fold(samples, pair.learned.costs.medians()).total
                assert live.speedup
                row = {
                    "temperature": temperature,
                    "way": name,
                    "alpha": replayed.alpha,
                    "live_alpha": live.alpha,
                    "speedup": replayed.speedup,
                    "live_speedup": live.speedup.value,
                    "low": live.speedup.low,
                    "high": live.speedup.high,
                }
                rows.append(row)
                print(
                    f"T {temperature:g} {name:<8} alpha {replayed.alpha or 0:.3f} live "
                    f"{live.alpha or 0:.3f}, speed-up {replayed.speedup:.3f} live "
                    f"{live.speedup.value:.3f} ({live.speedup.low:.3f} to {live.speedup.high:.3f})",
                    file=sys.stderr,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
