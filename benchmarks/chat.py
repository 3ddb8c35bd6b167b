"""A chat of twenty turns, on the demo pair: what a late turn waits for, and what drafts are worth.

python benchmarks/chat.py [--model FILE --model-draft FILE] [--json FILE]

``ttft20_vs_ttft2`` is the time from a message to the first token of its answer in turn 20 over that
in turn 2, the medians of several chats, for messages of the same length. Attention reads the whole
context, so this grows with it, most of all in a small model: ``ttft20_vs_decode`` divides the time
of turn 20 by that of the target's decode of the same tokens after a text of the same length.
``alpha_self`` is the acceptance rate of the last ten turns, at temperature 1, if the draft is the
target's own file: below 1 by roundings alone, unless the two caches have come apart.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.chat.chat import Chat
from qdraft.chat.settings import Settings
from qdraft.decoding.rates import count
from qdraft.pairs import registry
from qdraft.pairs.packages import materialize

WANTED = {"ttft20_vs_ttft2": "<= 1.3", "ttft20_vs_decode": "<= 1.3", "alpha_self": ">= 0.98"}
MESSAGE = "Tell me one more thing about rivers, in one sentence."
N_TURNS, N_CHATS, N_ANSWER = 20, 3, 24
GREEDY = SamplingParams(temperature=0)
PLAIN = SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file, too")
    parser.add_argument("--model", type=Path, help="target, in place of the demo pair's")
    parser.add_argument("--model-draft", type=Path, help="draft of --model")
    args = parser.parse_args()
    target, draft = args.model, args.model_draft
    if target is None:
        target, draft = materialize(registry.load().find("smollm2"), threads=2)
    params = EngineParams(n_ctx=2048)
    with Pair(PairSpec.of(target, draft, params)) as pair:
        chats = [turns_of(pair, GREEDY, DecodeParams(n_predict=N_ANSWER)) for _ in range(N_CHATS)]
        decode_s = decode_seconds(pair, chats[0][-1])
    with Pair(PairSpec.of(target, target, params)) as pair:
        fixed = DecodeParams(n_predict=N_ANSWER, draft_policy="fixed", n_draft=4, seed=1)
        own = turns_of(pair, PLAIN, fixed)
    late = [round for turn in own[N_TURNS // 2 :] for round in turn["rounds"]]
    bars = {
        "ttft20_vs_ttft2": ttft(chats, N_TURNS) / ttft(chats, 2),
        "ttft20_vs_decode": ttft(chats, N_TURNS) / decode_s,
        "alpha_self": count(late).alpha,
    }
    report = {
        "load": os.getloadavg()[0],
        "target": target.name,
        "decode_s": decode_s,
        "ttft_s": [ttft(chats, turn) for turn in range(1, N_TURNS + 1)],
        "n_read": [turn["n_read"] for turn in chats[0]],
        "n_context": [turn["n_context"] for turn in chats[0]],
        "n_tested_self": count(late).n_tested,
        "bars": bars,
    }
    for name, value in bars.items():
        print(f"{name:<16} {value:6.3f}  {WANTED[name]}")
    print(json.dumps(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def turns_of(pair: Pair, sampling: SamplingParams, decode: DecodeParams) -> list[dict[str, Any]]:
    """Make a chat of the same message again and again; return what each turn took."""
    turns = []
    with Chat(pair, Settings(sampling, decode)) as chat:
        for _ in range(N_TURNS):
            started = time.perf_counter()
            answer = chat.ask(MESSAGE)
            chunks = iter(answer)
            next(chunks)
            ttft_s = time.perf_counter() - started
            for _ in chunks:
                pass
            figures = answer.figures
            turns.append(
                {
                    "ttft_s": ttft_s,
                    "prompt": answer.generation.prompt,
                    "n_read": figures.n_read,
                    "n_context": figures.n_context,
                    "rounds": answer.generation.rounds,
                }
            )
    return turns


def decode_seconds(pair: Pair, turn: dict[str, Any]) -> float:
    """The median seconds in which the target reads what is new in the prompt of a turn."""
    prompt, times = turn["prompt"], []
    n_before = len(prompt) - turn["n_read"]
    with pair.sequences() as sequences:
        sequences.target.eval(prompt[:n_before], 0)
        for _ in range(5):
            started = time.perf_counter()
            sequences.target.eval(prompt[n_before:], 1)
            times.append(time.perf_counter() - started)
            sequences.target.truncate(n_before)
    return median(times)


def ttft(chats: list[list[dict[str, Any]]], turn: int) -> float:
    """The median seconds to the first token of a turn, counted from 1."""
    return median(turns[turn - 1]["ttft_s"] for turns in chats)


if __name__ == "__main__":
    main()
