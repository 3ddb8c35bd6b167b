"""`qdraft explain`: whether drafting pays in a situation, and what would change that."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.studies import Shown, show_study
from qdraft.errors import UsageError
from qdraft.gguf.facts import read_facts
from qdraft.render import explain as view
from qdraft.study.explain import Figures, Situation
from qdraft.study.explain import explain as find

_PAIR, _ASKED = "The pair's figures", "The situation"

FromFile = Annotated[
    Path | None,
    opt.option(_PAIR, "--from", help="What qdraft bench -o json printed; - for stdin."),
]
Alpha = Annotated[
    str | None,
    opt.option(_PAIR, "--alpha", help="Acceptance rate, or by temperature as 0=0.9,1=0.8."),
]
C = Annotated[
    float | None, opt.option(_PAIR, "--c", min=0, help="Time of a draft token, in target tokens.")
]
V = Annotated[
    str | None,
    opt.option(_PAIR, "--v", help="Time of target decodes by rows, as 2=1.06,8=1.1."),
]
OwnKv = Annotated[
    bool, opt.option(_PAIR, "--own-kv", help="The draft keeps its own KV: it reads the prompt too.")
]
Temperature = Annotated[
    float | None, opt.option(_ASKED, "--temp", "--temperature", min=0, help="0 is greedy.")
]
PromptTokens = Annotated[
    int | None, opt.option(_ASKED, "--prompt-tokens", min=1, help="Tokens of the prompt.")
]
NPredict = Annotated[
    int | None, opt.option(_ASKED, "-n", "--n-predict", min=1, help="Tokens of the text.")
]
Users = Annotated[int, opt.option(_ASKED, "--users", min=1, help="Texts at the same time.")]
Memory = Annotated[
    str | None, opt.option(_ASKED, "--memory", help="Memory for the weights, as 8G.")
]
Experts = Annotated[
    str | None, opt.option(_ASKED, "--experts", help="A mixture of experts, as 8/64.")
]


def explain(
    target: opt.Target = None,
    draft: opt.DraftFile = None,
    bench: FromFile = None,
    alpha: Alpha = None,
    c: C = None,
    v: V = None,
    own_kv: OwnKv = False,
    temperature: Temperature = None,
    n_prompt: PromptTokens = None,
    n_predict: NPredict = None,
    users: Users = 1,
    memory: Memory = None,
    experts: Experts = None,
    output: study.OutputFormat = "table",
    as_json: opt.Json = False,
) -> None:
    """Say whether drafting pays in a situation, with the formula and its numbers.

    The figures are a bench's (--from) or given by hand; files (-m, -d) add sizes and experts.
    """
    shown = Shown(output, as_json, True, None, True, None)
    known: dict[str, Any] = _from_bench(bench) if bench else {"alpha": {}, "v": {}}
    if alpha:
        known["alpha"] = _alphas(alpha)
    if c is not None:
        known["c"] = c
    if v:
        known["v"] = study.parse_costs(v)
    missing = [f"--{name}" for name in ("alpha", "c", "v") if known.get(name) in (None, {})]
    if missing:
        raise UsageError(
            f"without {' and '.join(missing)} nothing can be said",
            hint="--from takes them from qdraft bench -o json",
        )
    if own_kv:
        known["shares_kv"] = False
    known |= _of_files(target, draft)
    if experts:
        known["experts"] = _experts(experts)
    n_bytes = opt.parse_size(memory, "--memory") if memory else None
    if memory and not (target and draft):
        raise UsageError("--memory needs both files (-m, -d), whose sizes it is held against")
    situation = Situation(temperature, n_prompt, n_predict, users, n_bytes)
    found = find(Figures(**known), situation)
    show_study(
        "qdraft explain", view.sheets(found), [], view.report(found, known, situation), [],
        [one.words for one in found[:1]], shown,
    )  # fmt: skip


def _from_bench(path: Path) -> dict[str, Any]:
    """Figures out of a bench's JSON."""
    text = opt.read_prompt(None, str(path))
    try:
        data = json.loads(text)
        rows = {
            row["temperature"]: row["alpha"]
            for row in data["by_temperature"] if row["alpha"] is not None
        }  # fmt: skip
        total, target_s = data["total"], data["target_s"]
        reading = total["alone_ttft_s"] / max(1.0, total["n_prompt"]) / target_s
        return {
            "alpha": rows, "c": data["c"].get("model"),
            "v": {int(n): x for n, x in data["v"].items()},
            "shares_kv": data["kv"]["shared"], "prompt_cost": reading,
        }  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no bench", hint="qdraft bench -o json > FILE makes one"
        ) from error


def _of_files(target: Path | None, draft: Path | None) -> dict[str, Any]:
    """Sizes, bits and experts of the files that are given."""
    known: dict[str, Any] = {}
    if target:
        facts = read_facts(target)
        known["target_bytes"], known["target_bits"] = facts.n_bytes, facts.bits_per_weight
        if facts.n_experts and facts.n_experts_used:
            known["experts"] = (facts.n_experts_used, facts.n_experts)
    if draft:
        known["draft_bytes"] = read_facts(draft).n_bytes
    return known


def _alphas(text: str) -> dict[float, float]:
    """0.8, or 0=0.9,1=0.8."""
    try:
        found = {
            float(part.partition("=")[0] if "=" in part else 0): float(part.rpartition("=")[2])
            for part in text.split(",")
        }
    except ValueError:
        found = {0.0: -1.0}
    if any(t < 0 or not 0 <= a <= 1 for t, a in found.items()):
        raise UsageError(f"--alpha is {text}, but must be as 0.8 or 0=0.9,1=0.8")
    return found


def _experts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 0 < int(found[1]) <= int(found[2]):
        raise UsageError(f"--experts is {text}, but must be as 8/64: those of a token, and all")
    return int(found[1]), int(found[2])
