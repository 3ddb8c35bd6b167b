"""`qdraft explain`: whether drafting pays off in a situation, and what would change that."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli.options.devices import parse_size
from qdraft.cli.options.group import Group, Only, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.options.study import CostOptions, parse_costs
from qdraft.cli.options.text import read_prompt
from qdraft.cli.show_study import StudyView, show_study
from qdraft.errors import UsageError
from qdraft.gguf.facts import read_facts
from qdraft.render import explain as render
from qdraft.study.explain import Figures, Situation
from qdraft.study.explain import explain as find

_PAIR, _SITUATION = "The pair's figures", "The situation"


@dataclass(frozen=True, kw_only=True)
class FigureOptions(CostOptions):
    """What is known of a pair: the figures of a bench, or figures given by hand."""

    bench: Annotated[
        Path | None,
        option(
            _PAIR,
            "--from",
            help="Read the figures from this output of qdraft bench -o json; - is standard input.",
        ),
    ] = None
    alpha: Annotated[
        str | None,
        option(
            _PAIR,
            "--alpha",
            help="Acceptance rate, or acceptance rates by temperature, for example 0=0.9,1=0.8.",
        ),
    ] = None
    own_kv: Annotated[
        bool,
        option(
            _PAIR, "--own-kv", help="The draft has a KV cache of its own, so it reads the prompt."
        ),
    ] = False

    def known(self) -> dict[str, Any]:
        """Return the figures by their names in ``Figures``. Raises UsageError."""
        known: dict[str, Any] = _read_bench(self.bench) if self.bench else {"alpha": {}, "v": {}}
        if self.alpha:
            known["alpha"] = _parse_alphas(self.alpha)
        if self.c is not None:
            known["c"] = self.c
        if self.v:
            known["v"] = parse_costs(self.v)
        missing = [f"--{name}" for name in ("alpha", "c", "v") if known.get(name) in (None, {})]
        if missing:
            raise UsageError(
                f"qdraft explain needs {' and '.join(missing)}",
                hint="take them from qdraft bench -o json with --from",
            )
        if self.own_kv:
            known["shares_kv"] = False
        return known


@dataclass(frozen=True, kw_only=True)
class SituationOptions(Group):
    """The situation that the question is about."""

    temperature: Annotated[
        float | None,
        option(
            _SITUATION,
            "--temp",
            "--temperature",
            min=0,
            help="Sampling temperature; 0 always takes the likeliest token.",
        ),
    ] = None
    n_prompt: Annotated[
        int | None,
        option(_SITUATION, "--prompt-tokens", min=1, help="Number of tokens in the prompt."),
    ] = None
    n_predict: Annotated[
        int | None,
        option(_SITUATION, "-n", "--n-predict", min=1, help="Number of tokens to generate."),
    ] = None
    users: Annotated[
        int, option(_SITUATION, "--users", min=1, help="Number of texts at the same time.")
    ] = 1
    memory: Annotated[
        str | None,
        option(_SITUATION, "--memory", help="Memory for the weights, for example 8G."),
    ] = None
    experts: Annotated[
        str | None,
        option(
            _SITUATION,
            "--experts",
            help="Experts that each token uses, of all, for example 8/64.",
        ),
    ] = None

    def situation(self) -> Situation:
        """Return the situation. Raises UsageError."""
        memory = parse_size(self.memory, "--memory") if self.memory else None
        return Situation(self.temperature, self.n_prompt, self.n_predict, self.users, memory)


@takes_options
def explain(
    models: Annotated[ModelOptions, Only("target", "draft")],
    figures: FigureOptions,
    asked: SituationOptions,
    output: Annotated[StudyOutputOptions, Only("output", "as_json")],
) -> None:
    """Say whether drafting pays off in a situation, with the formula and its numbers.

    The figures come from a bench (--from) or from --alpha, --c and --v. The files of --model and
    --model-draft add their sizes and experts.
    """
    known = figures.known() | _read_files(models.target, models.draft)
    if asked.experts:
        known["experts"] = _parse_experts(asked.experts)
    situation = asked.situation()
    if asked.memory and not (models.target and models.draft):
        raise UsageError("--memory needs --model and --model-draft, for the sizes of the files")
    findings = find(Figures(**known), situation)
    view = StudyView(
        "qdraft explain",
        render.sheets(findings),
        [],
        render.report(findings, known, situation),
        [finding.words for finding in findings[:1]],
    )
    show_study(view, output)


def _read_bench(path: Path) -> dict[str, Any]:
    """The figures in a bench's JSON."""
    text = read_prompt(None, str(path))
    try:
        data = json.loads(text)
        alphas = {
            row["temperature"]: row["alpha"]
            for row in data["by_temperature"]
            if row["alpha"] is not None
        }
        total, target_s = data["total"], data["target_s"]
        return {
            "alpha": alphas,
            "c": data["c"].get("model"),
            "v": {int(n): x for n, x in data["v"].items()},
            "shares_kv": data["kv"]["shared"],
            "prompt_cost": total["alone_ttft_s"] / max(1.0, total["n_prompt"]) / target_s,
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is not the output of qdraft bench -o json",
            hint="write it with qdraft bench -o json > FILE",
        ) from error


def _read_files(target: Path | None, draft: Path | None) -> dict[str, Any]:
    """The sizes, bits and experts of the files that are given."""
    known: dict[str, Any] = {}
    if target:
        facts = read_facts(target)
        known["target_bytes"], known["target_bits"] = facts.n_bytes, facts.bits_per_weight
        if facts.n_experts and facts.n_experts_used:
            known["experts"] = (facts.n_experts_used, facts.n_experts)
    if draft:
        known["draft_bytes"] = read_facts(draft).n_bytes
    return known


def _parse_alphas(text: str) -> dict[float, float]:
    """The acceptance rates by temperature of 0.8, or of 0=0.9,1=0.8."""
    try:
        alphas = {
            float(part.partition("=")[0] if "=" in part else 0): float(part.rpartition("=")[2])
            for part in text.split(",")
        }
    except ValueError:
        alphas = {0.0: -1.0}
    if any(t < 0 or not 0 <= a <= 1 for t, a in alphas.items()):
        raise UsageError(
            f"--alpha is {text} but must be from 0 to 1", hint="for example 0.8 or 0=0.9,1=0.8"
        )
    return alphas


def _parse_experts(text: str) -> tuple[int, int]:
    """The experts that a token uses, and all, of 8/64."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--experts is {text} but must be the experts of a token, and all",
            hint="for example --experts 8/64",
        )
    return int(match[1]), int(match[2])
