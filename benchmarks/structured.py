"""Structured answers: are all of them valid, and is drafting faster under a constraint?

    python benchmarks/structured.py --out structured.json

200 schemas of a generator of its own, over types, enums, nesting, patterns, arrays, numbers with
bounds and optional properties. At temperature 1 the default pair answers each of them twice, with
drafts and without: every answer has to parse, to end and to validate. The speed comes from the rig
(``benchmarks/rig.py``), on some of the schemas, with drafts and alone in turn. Of one schema both
write answers that differ, because they draw other numbers, so speed is tokens per second over all.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import rig

import qdraft
from qdraft.decoding.constraint import ConstraintSpec

# What the bars have to reach: the share of answers that are valid, and tokens per second over those
# of the target alone under the same constraint.
WANTED = {"valid": 1.0, "vs_target": 1.2}

_WORDS = [
    "name",
    "kind",
    "colour",
    "size",
    "owner",
    "note",
    "place",
    "price",
    "level",
    "state",
    "date",
    "code",
    "unit",
    "role",
    "tag",
]
_VALUES = [
    "red",
    "green",
    "blue",
    "small",
    "large",
    "open",
    "closed",
    "draft",
    "final",
    "north",
    "south",
    "east",
    "west",
]
_PATTERNS = ["^[A-Z]{2}-[0-9]{4}$", "^[a-z]{3,8}$", "^#[0-9a-f]{6}$", "^v[0-9]\\.[0-9]{1,2}$"]
_N_PREDICT = 400


def make_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return an object schema; deeper ones are smaller, and every answer has an end."""
    names = rng.sample(_WORDS, rng.randint(2, 5 - depth))
    properties = {name: _make_value(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _make_value(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    makers = [
        lambda: {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(8, 24)},
        lambda: {"enum": rng.sample(_VALUES, rng.randint(2, 5))},
        lambda: {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 900)},
        lambda: {"type": "number", "minimum": 0, "maximum": rng.randint(1, 100)},
        lambda: {"type": "boolean"},
        lambda: {"type": "string", "pattern": rng.choice(_PATTERNS)},
        lambda: {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 99}]},
        lambda: {"const": rng.choice(_VALUES)},
    ]
    if depth < 2:
        makers += [
            lambda: make_schema(rng, depth + 1),
            lambda: {
                "type": "array",
                "items": _make_value(rng, 2),
                "minItems": rng.randint(0, 1),
                "maxItems": rng.randint(2, 4),
            },
        ]
    return rng.choice(makers)()


def schemas(n: int) -> list[dict[str, Any]]:
    """Return ``n`` schemas, the same in every run."""
    return [make_schema(random.Random(seed)) for seed in range(n)]


def problem_of(text: str, finish: qdraft.FinishReason, schema: dict[str, Any]) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if finish is not qdraft.FinishReason.END_OF_GENERATION:
        return f"ended by {finish.value}"
    try:
        jsonschema.validate(json.loads(text), schema)
    except ValueError as error:
        return f"does not parse: {error}"
    except jsonschema.ValidationError as error:
        return f"does not validate: {error.message}"
    return ""


def answer(
    pair: qdraft.Pair, schema: dict[str, Any], seed: int, decode: qdraft.DecodeParams
) -> qdraft.Generation:
    """Generate an answer at temperature 1, from all tokens that the schema allows."""
    text = pair.generate(
        f"Give an example that matches this JSON schema: {json.dumps(schema)}",
        qdraft.SamplingParams(temperature=1, top_k=0, top_p=1, min_p=0),
        replace(
            decode,
            n_predict=_N_PREDICT,
            seed=seed,
            constraint=ConstraintSpec("json_schema", json.dumps(schema)),
        ),
    )
    text.read()
    return text


def check_validity(n: int) -> dict[str, Any]:
    """Answer ``n`` schemas with the default pair, with drafts and without."""
    problems, n_forced, n_tokens = [], 0, 0
    drafted = qdraft.DecodeParams(draft_policy="fixed", n_draft=4)
    with qdraft.open_pair() as pair:
        for seed, schema in enumerate(schemas(n)):
            for name, decode in _arms(drafted):
                text = answer(pair, schema, seed, decode)
                if problem := problem_of(text.text, text.finish_reason, schema):
                    problems.append(
                        {"seed": seed, "arm": name, "problem": problem, "text": text.text}
                    )
                counts = text.summary.sources.get("constraint", {"n_accepted": 0})
                n_forced += counts["n_accepted"]
                n_tokens += text.summary.n_tokens if name == "drafted" else 0
            print(f"\r{seed + 1} of {n} schemas, {len(problems)} problems", end="", file=sys.stderr)
    print(file=sys.stderr)
    return {
        "n_schemas": n,
        "n_answers": 2 * n,
        "valid": 1 - len(problems) / (2 * n),
        "problems": problems,
        "forced_share": n_forced / n_tokens,
    }


def _arms(drafted: qdraft.DecodeParams) -> Iterator[tuple[str, qdraft.DecodeParams]]:
    yield "drafted", drafted
    yield "alone", qdraft.DecodeParams(n_draft=0)


def measure_speed(n: int) -> dict[str, Any]:
    """Answer ``n`` schemas with the rig, with drafts and alone in turn."""
    target, draft = rig.rig("large"), rig.rig("large", "Q2_K")
    n_tokens, seconds = {"drafted": 0, "alone": 0}, {"drafted": 0.0, "alone": 0.0}
    sources: dict[str, dict[str, int]] = {}
    with qdraft.open_pair(target=target, draft=draft) as pair:
        answer(pair, schemas(1)[0], 0, qdraft.DecodeParams())  # the first text measures the costs
        for seed, schema in enumerate(schemas(n)):
            order = list(_arms(qdraft.DecodeParams()))
            for name, decode in order if seed % 2 else reversed(order):
                text = answer(pair, schema, seed, decode)
                summary = text.summary
                n_tokens[name] += summary.n_tokens - 1
                seconds[name] += summary.draft_s + summary.verify_s + summary.other_s
                for source, counts in summary.sources.items():
                    total = sources.setdefault(source, dict.fromkeys(counts, 0))
                    for key, count in counts.items():
                        total[key] += count
            print(f"\r{seed + 1} of {n} schemas", end="", file=sys.stderr)
    print(file=sys.stderr)
    speed = {name: n_tokens[name] / seconds[name] for name in n_tokens}
    return {
        "n_schemas": n,
        "n_tokens": n_tokens,
        "tokens_per_second": speed,
        "vs_target": speed["drafted"] / speed["alone"],
        "sources": sources,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=int, default=200, help="schemas that must be valid")
    parser.add_argument("--timed", type=int, default=12, help="schemas on the rig")
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    args = parser.parse_args()
    validity = check_validity(args.schemas)
    speed = measure_speed(args.timed)
    bars = {"valid": validity["valid"], "vs_target": speed["vs_target"]}
    report = {"bars": bars, "wanted": WANTED, "validity": validity, "speed": speed}
    text = json.dumps(report, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(bars[name] >= wanted for name, wanted in WANTED.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
