"""Simulate the draft policy: how close to the best fixed length, and how much a bad draft costs.

    python benchmarks/simulate_policy.py [--seeds 200] [--constants name=value ...]

Each line is a pair and a length of text. "x" is the speed of the best fixed draft length over the
target alone; "mean" and "tenth" are auto over that length, on average and in the worst tenth of the
seeds. Each text is the first of its process. For pairs that do not pay off, "worst 200" is the most
time that any 200 tokens of ten texts took over that of the target alone.
"""

from __future__ import annotations

import argparse

from simulated import LOSING, PAYING, STREAMED, score, uninformed, worst_window, write_texts

from qdraft.decoding.policy import constants

N_SHORT, N_LONG = 64, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--constants", nargs="*", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    for name, value in (setting.split("=") for setting in args.constants):
        now = getattr(constants.CONSTANTS, name)
        # The default of every table is this one object: it is frozen for all others.
        object.__setattr__(constants.CONSTANTS, name, type(now)(value))
    seeds = range(args.seeds)
    print(f"{'pair':<20}{'confidence':<13}{'tokens':>6}{'best':>6}{'x':>7}{'mean':>8}{'tenth':>8}")
    for pair in (*PAYING, *STREAMED):
        for shown, of_kind in (("informative", pair), ("noise", uninformed(pair))):
            for n in (N_SHORT, N_LONG):
                result = score(of_kind, n, seeds, longest=32 if pair in STREAMED else 12)
                print(
                    f"{pair.name:<20}{shown:<13}{n:>6}{result.best:>6}{result.speedup:>7.2f}"
                    f"{result.mean:>8.3f}{result.worst_tenth:>8.3f}",
                    flush=True,
                )
    print(f"\n{'pair':<20}{'worst 200':>10}{'all':>8}")
    for pair in LOSING:
        texts = [write_texts(pair, seed) for seed in range(max(1, args.seeds // 10))]
        rounds = [r for text in texts for r in text]
        time = sum(r.time for r in rounds) / sum(r.n_emitted for r in rounds)
        print(f"{pair.name:<20}{max(map(worst_window, texts)):>10.3f}{time:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
