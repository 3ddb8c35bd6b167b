"""Hybrid drafting with and without the cascade, on texts that repeat themselves and others.

Both contenders and the target alone write each prompt in turn, on the large rig, at temperature 0
and 1. Each contender learns its own costs and acceptance rates. Speed is total tokens over total
seconds after the first token, given as a ratio to the target alone.

    python benchmarks/cascade.py [--json FILE]

takes under 6 minutes on two cores: after --seconds it starts no further prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rig import rig

from qdraft import DecodeParams, EngineParams, Pair, PairSpec, SamplingParams
from qdraft.decoding.drafters.cascade import CascadeDrafter
from qdraft.decoding.drafters.hybrid import HybridDrafter
from qdraft.decoding.drafters.model import ModelDrafter
from qdraft.decoding.drafters.ngram import NgramDrafter
from qdraft.decoding.drafters.protocol import Drafter, NoDrafter
from qdraft.decoding.intervals import Ratio, TimedText, speed_ratio
from qdraft.decoding.policy.learned import Learned
from qdraft.session.session import Session
from qdraft.session.store import describe_machine
from qdraft.study.prompts import WARM_UP

TEMPERATURES = (0.0, 1.0)
ALONE, CASCADE, PLAIN = "target alone", "hybrid with cascade", "hybrid without cascade"
_CODE = """\
def read_rows(path):
    rows = []
    with open(path) as file:
        for line in file:
            name, price = line.split(",")
            rows.append((name, float(price)))
    return rows
"""
_LETTER = (
    "Dear Mrs. Smith, thank you for the parcel. The blue vase was broken, the two cups are fine. "
    "Please send another blue vase to the same address before the end of May. Yours, Tom Hill."
)
_LIST = "apples 3.20, pears 4.10, plums 2.90, cherries 6.50, grapes 3.80, lemons 1.70"
PROMPTS: dict[str, tuple[str, ...]] = {
    "repeats": (
        f"Write this Python function again and rename rows to items:\n\n{_CODE}",
        f"Copy this letter and replace May by June:\n\n{_LETTER}",
        f"Write this price list again, one item a line:\n\n{_LIST}",
        f"Copy this function, then add a docstring to it:\n\n{_CODE}",
    ),
    "new": (
        "Tell me a short story about a dragon who is afraid of fire.",
        "How does a refrigerator keep food cold?",
        "Write a Python function that sorts a list using quicksort.",
        "What is the capital of France and what is it famous for?",
    ),
}


@dataclass(frozen=True, slots=True)
class Text:
    """One text by one contender. ``n_tokens`` and ``seconds`` are those after the first token."""

    kind: str
    prompt: int
    temperature: float
    contender: str
    n_tokens: int
    seconds: float
    n_drafted: int
    n_tested: int
    n_accepted: int
    repetition: float | None
    sources: dict[str, dict[str, int]]


class Contender:
    """A way to draft, with what it has learned so far."""

    def __init__(self, name: str, make_drafter: Callable[[ModelDrafter], Drafter] | None) -> None:
        """``make_drafter`` gets the pair's draft model; None is the target alone."""
        self.name = name
        self._make_drafter = make_drafter
        self._learned = Learned()

    def write(
        self, pair: Pair, kind: str, place: int, prompt: str, temperature: float, n_predict: int
    ) -> Text:
        """Write one text from empty caches and time what follows its first token."""
        pair.learned = self._learned
        sampling = SamplingParams(temperature, top_k=0, top_p=1, min_p=0)
        alone = self._make_drafter is None
        params = DecodeParams(
            n_predict=n_predict,
            seed=place,
            n_draft=0 if alone else None,
            draft_policy="fixed" if alone else "auto",
        )
        text = OwnSession(pair, self._make_drafter).generate(prompt, sampling, params)
        started, n_first = 0.0, 0
        for _ in text:
            if not n_first:
                started, n_first = time.perf_counter(), len(text.tokens)
        seconds, summary = time.perf_counter() - started, text.summary
        return Text(
            kind=kind,
            prompt=place,
            temperature=temperature,
            contender=self.name,
            n_tokens=len(text.tokens) - n_first,
            seconds=seconds,
            n_drafted=summary.n_drafted,
            n_tested=summary.n_tested,
            n_accepted=summary.n_accepted,
            repetition=summary.repetition,
            sources=summary.sources,
        )


class OwnSession(Session):
    """A session of one text with the drafter of a contender."""

    def __init__(self, pair: Pair, make_drafter: Callable[[ModelDrafter], Drafter] | None) -> None:
        super().__init__(pair, keep=False)
        self._make_own = make_drafter

    def drafter(self, params: DecodeParams, n_most: int) -> Drafter:
        model = self.model_drafter()
        return self._make_own(model) if self._make_own and model else NoDrafter()


def with_cascade(model: ModelDrafter) -> Drafter:
    ngram = NgramDrafter()
    return HybridDrafter(ngram, CascadeDrafter(ngram, model), model)


def without_cascade(model: ModelDrafter) -> Drafter:
    return HybridDrafter(NgramDrafter(), model)


def measure(pair: Pair, n_predict: int, seconds: float) -> list[Text]:
    """Every prompt at both temperatures by all contenders, in an order that turns with the prompt.

    Starts no further prompt after ``seconds``.
    """
    contenders = [
        Contender(ALONE, None),
        Contender(CASCADE, with_cascade),
        Contender(PLAIN, without_cascade),
    ]
    for contender in contenders:  # weights into memory, and first costs
        contender.write(pair, "warm-up", 0, WARM_UP, 1.0, n_predict // 2)
    texts: list[Text] = []
    started = time.perf_counter()
    n_each = max(map(len, PROMPTS.values()))
    turn = 0
    for place in range(n_each):
        for kind, prompts in PROMPTS.items():
            for temperature in TEMPERATURES:
                if time.perf_counter() - started > seconds:
                    return texts
                turn = (turn + 1) % len(contenders)
                texts += [
                    contender.write(pair, kind, place, prompts[place], temperature, n_predict)
                    for contender in contenders[turn:] + contenders[:turn]
                ]
                print(f"{kind} {place}, temperature {temperature:g}", file=sys.stderr, flush=True)
    return texts


def ratio(ours: Sequence[Text], theirs: Sequence[Text]) -> Ratio | None:
    """Speed of ours over theirs, total over total, with an interval over paired texts."""
    return speed_ratio(
        [TimedText(t.n_tokens, t.seconds) for t in ours],
        [TimedText(t.n_tokens, t.seconds) for t in theirs],
    )


def fold(texts: Sequence[Text]) -> list[dict[str, Any]]:
    """One row for each kind of text, temperature and contender, then for all texts together."""
    groups = [(kind, t) for kind in PROMPTS for t in TEMPERATURES]
    rows = []
    for kind, temperature in [*groups, (None, None)]:
        chosen = [
            t for t in texts if kind is None or (t.kind, t.temperature) == (kind, temperature)
        ]
        by_name = {
            name: [t for t in chosen if t.contender == name] for name in (ALONE, CASCADE, PLAIN)
        }
        for name, own in by_name.items():
            if own:
                rows.append(_row(own, by_name[ALONE], kind, temperature, name))
        if by_name[CASCADE]:
            gain = ratio(by_name[CASCADE], by_name[PLAIN])
            rows[-1]["cascade_over_plain"] = asdict(gain) if gain else None
    return rows


def _row(
    own: Sequence[Text],
    alone: Sequence[Text],
    kind: str | None,
    temperature: float | None,
    contender: str,
) -> dict[str, Any]:
    gain = ratio(own, alone)
    tested, drafted = sum(t.n_tested for t in own), sum(t.n_drafted for t in own)
    accepted = sum(t.n_accepted for t in own)
    known = [t.repetition for t in own if t.repetition is not None]
    sources: dict[str, dict[str, int]] = {}
    for text in own:
        for source, counts in text.sources.items():
            sums = sources.setdefault(source, dict.fromkeys(counts, 0))
            for key, n in counts.items():
                sums[key] += n
    return {
        "kind": kind,
        "temperature": temperature,
        "contender": contender,
        "n_texts": len(own),
        "n_tokens": sum(t.n_tokens for t in own),
        "seconds": sum(t.seconds for t in own),
        "x_alone": asdict(gain) if gain else None,
        "alpha": accepted / tested if tested else None,
        "draft_yield": accepted / drafted if drafted else None,
        "repetition": sum(known) / len(known) if known else None,
        "sources": sources,
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print one line a row."""
    for row in rows:
        kind = "all" if row["kind"] is None else f"{row['kind']}, T {row['temperature']:g}"
        alpha = "" if row["alpha"] is None else f"  alpha {row['alpha']:.3f}"
        drafted = ", ".join(f"{name} {of['n_drafted']}" for name, of in row["sources"].items())
        speed = _in_words(row["x_alone"])
        print(f"{kind:<13} {row['contender']:<23} x {speed:<22}{alpha}  {drafted}".rstrip())
        if "cascade_over_plain" in row:
            print(f"{'':<13} with over without       x {_in_words(row['cascade_over_plain'])}")


def _in_words(gain: dict[str, float | None] | None) -> str:
    if gain is None:
        return "n/a"
    if gain["low"] is None:
        return f"{gain['value']:.3f}"
    return f"{gain['value']:.3f} ({gain['low']:.3f} to {gain['high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="large", help="size of the rig: small or large")
    parser.add_argument("--draft", default="Q4_K_M", help="file type of the draft")
    parser.add_argument("--n-predict", type=int, default=64, help="tokens of a text at most")
    parser.add_argument("--seconds", type=float, default=300, help="start no prompt after these")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    files = rig(args.size), rig(args.size, args.draft)
    load = os.getloadavg()[0]
    with Pair(PairSpec.of(*files, EngineParams(n_ctx=1024))) as pair:
        texts = measure(pair, args.n_predict, args.seconds)
    rows = fold(texts)
    print(f"{args.size} rig, F16 with {args.draft}, load {load:.2f} before")
    show(rows)
    if args.json:
        report = {
            "machine": describe_machine(),
            "rig": args.size,
            "draft": args.draft,
            "n_predict": args.n_predict,
            "rows": rows,
            "texts": [asdict(text) for text in texts],
        }
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
