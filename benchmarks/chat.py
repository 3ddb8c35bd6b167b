"""A chat of twenty turns on the demo pair: what a late turn waits for, and what drafts are worth.

python benchmarks/chat.py [--json FILE]

``ttft20_vs_ttft2`` is the time to the first token of turn 20 over that of turn 2, the medians of
several chats, for a new message of the same length. ``alpha_self`` is the acceptance rate of the
last ten turns, at temperature 1, if the draft is the target's own file: below 1 by roundings alone,
unless the two caches have come apart.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from typing import Any

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.chat.chat import Chat
from qdraft.chat.settings import Settings
from qdraft.decoding.rates import count
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize

WANTED = {"ttft20_vs_ttft2": "<= 1.3", "alpha_self": ">= 0.98"}
MESSAGE = "Tell me one more thing about rivers, in one sentence."
N_TURNS, N_CHATS, N_ANSWER = 20, 3, 24
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    path = parser.parse_args().json
    target, draft = materialize(registry.load().find("smollm2"), threads=2)
    params = EngineParams(n_ctx=2048)
    with Pair(PairSpec.of(target, draft, params)) as pair:
        chats = [turns_of(pair, GREEDY, DecodeParams(n_predict=N_ANSWER)) for _ in range(N_CHATS)]
    with Pair(PairSpec.of(target, target, params)) as pair:
        fixed = DecodeParams(n_predict=N_ANSWER, draft_policy="fixed", n_draft=4, seed=1)
        own = turns_of(pair, PLAIN, fixed)
    late = [round for turn in own[N_TURNS // 2 :] for round in turn["rounds"]]
    bars = {
        "ttft20_vs_ttft2": ttft(chats, N_TURNS) / ttft(chats, 2),
        "alpha_self": count(late).alpha,
    }
    report = {
        "load": os.getloadavg()[0],
        "ttft_s": [ttft(chats, turn) for turn in range(1, N_TURNS + 1)],
        "n_read": [turn["n_read"] for turn in chats[0]],
        "n_context": [turn["n_context"] for turn in chats[0]],
        "n_tested_self": count(late).n_tested,
        "bars": bars,
    }
    for name, value in bars.items():
        print(f"{name:<16} {value:6.3f}  {WANTED[name]}")
    print(json.dumps(report))
    if path:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def turns_of(pair: Pair, sampling: SamplingParams, decode: DecodeParams) -> list[dict[str, Any]]:
    """Make a chat of the same message again and again; return what each turn took."""
    turns = []
    with Chat(pair, Settings(sampling, decode)) as chat:
        for _ in range(N_TURNS):
            answer = chat.ask(MESSAGE)
            for _ in answer:
                pass
            figures = answer.figures
            turns.append(
                {
                    "ttft_s": figures.summary.ttft_s,
                    "n_read": figures.n_read,
                    "n_context": figures.n_context,
                    "rounds": answer.generation.rounds,
                }
            )
    return turns


def ttft(chats: list[list[dict[str, Any]]], turn: int) -> float:
    """The median seconds to the first token of a turn, counted from 1."""
    return median(turns[turn - 1]["ttft_s"] for turns in chats)


if __name__ == "__main__":
    main()
