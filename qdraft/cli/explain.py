"""`qdraft explain`: whether drafting pays off in a situation, and what would change that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from qdraft.cli.options.devices import parse_size
from qdraft.cli.options.group import Group, Only, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.options.study import CostOptions, parse_costs
from qdraft.cli.options.text import read_named
from qdraft.cli.study_view import StudyView, show_study
from qdraft.errors import UsageError
from qdraft.render import explain as render
from qdraft.study.explain import Figures, Situation
from qdraft.study.explain import explain as find
from qdraft.study.known_figures import read_bench, read_files

_PAIR, _SITUATION = "The pair's figures", "The situation"


@dataclass(frozen=True, kw_only=True)
class FigureOptions(CostOptions):
    """What is known about a pair: the figures of a bench, or figures given by hand."""

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
        known: dict[str, Any] = {"alpha": {}, "v": {}}
        if self.bench:
            known = read_bench(read_named(str(self.bench)), self.bench)
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
            help="Experts used per token out of all experts, for example 8/64.",
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
    known = figures.known() | read_files(models.target, models.draft)
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


def _parse_alphas(text: str) -> dict[float, float]:
    """The acceptance rates by temperature, from text such as 0.8 or 0=0.9,1=0.8."""
    try:
        alphas = {
            float(part.partition("=")[0] if "=" in part else 0): float(part.rpartition("=")[2])
            for part in text.split(",")
        }
    except ValueError:
        alphas = {0.0: -1.0}
    if any(t < 0 or not 0 <= a <= 1 for t, a in alphas.items()):
        raise UsageError(
            f"--alpha is {text} but must be from 0 to 1",
            hint="give, for example, --alpha 0.8 or --alpha 0=0.9,1=0.8",
        )
    return alphas


def _parse_experts(text: str) -> tuple[int, int]:
    """The numbers of experts per token and of all experts, from text such as 8/64."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 0 < int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--experts is {text} but must be the experts per token and all experts",
            hint="give, for example, --experts 8/64",
        )
    return int(match[1]), int(match[2])
