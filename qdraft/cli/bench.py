"""`qdraft bench`: a pair on real work, beside the target alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.machine_options import Machine, takes_machine
from qdraft.cli.opening import Models, open_models
from qdraft.cli.run import INTERRUPTED
from qdraft.cli.studies import Shown, show_study
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.render import bench as view
from qdraft.render.progress import Bars
from qdraft.study.about import describe_pair
from qdraft.study.bench_spec import BenchSpec
from qdraft.study.prompts import built_in, read_tasks

_WORK = "Work"

Prompts = Annotated[
    Path | None,
    opt.option(
        _WORK,
        "--prompts",
        help='JSONL with {"kind": ..., "prompt": ...} a line, or Spec-Bench\'s questions.',
        default="our own",
    ),
]
Kinds = Annotated[
    str | None, opt.option(_WORK, "--kinds", help="Only these, as code,story.", default="all")
]
PerKind = Annotated[
    int, opt.option(_WORK, "--per-kind", min=1, max=2, help="Prompts of our own for each kind.")
]
Repeats = Annotated[
    int, opt.option(_WORK, "-r", "--repeats", min=1, max=100, help="Times that all is written.")
]
IgnoreEos = Annotated[
    bool, opt.option(_WORK, "--ignore-eos", help="No text ends before -n tokens.")
]


@takes_machine
def bench(
    target: opt.Target = None,
    draft: opt.DraftFile = None,
    pair: opt.PairName = None,
    models_file: opt.ModelsFile = None,
    prompts: Prompts = None,
    kinds: Kinds = None,
    per_kind: PerKind = 1,
    repeats: Repeats = 1,
    n_predict: study.NPredictStudy = 64,
    ignore_eos: IgnoreEos = False,
    temperatures: study.Temperatures = "0,1",
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    seed: opt.Seed = 1,
    drafter: opt.DrafterName = "model",
    draft_policy: opt.DraftPolicy = "auto",
    n_draft: opt.NDraft = None,
    p_min: opt.PMin = None,
    verify: opt.Verify = "block",
    share_kv: opt.ShareKv = "auto",
    ctx_size: opt.CtxSize = 2048,
    machine: Machine = Machine(),  # noqa: B008 (frozen)
    output: study.OutputFormat = "table",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    plot: study.PlotFile = None,
    no_plot: study.NoPlot = False,
    report: study.ReportFile = None,
) -> None:
    """Measure a pair on kinds of work: the target alone against qdraft, text by text.

    Answers which work and which temperature drafting pays for on this machine, how sure that is,
    and what the cost model makes of it.
    """
    shown = Shown(output, as_json, quiet, plot, no_plot, report)
    chosen = study.names_of(kinds) if kinds else None
    tasks = read_tasks(prompts, chosen) if prompts else built_in(chosen, per_kind)
    work = BenchSpec(
        tasks, study.parse_temperatures(temperatures), repeats, ignore_eos,
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p),
        DecodeParams(
            n_predict=n_predict, drafter=drafter, n_draft=n_draft, draft_policy=draft_policy,
            p_min=p_min, verification=verify, seed=max(0, seed),
        ),
    )  # fmt: skip
    models = Models(target, draft, pair, models_file, False, drafter == "ngram", share_kv)
    with open_models(
        models, *machine.engines(ctx_size), machine.servers, keep_draft=True, quiet=quiet
    ) as opened:
        if opened.draft is None and drafter != "ngram":
            raise UsageError("there is no draft to measure", hint="-d, or --drafter ngram")
        with Bars(quiet=quiet) as bars:
            found = work.run(opened, bars.step)
        about = {**describe_pair(opened, machine.threads), **work.describe()}
    show_study(
        "qdraft bench", view.sheets(found), view.charts(found), view.report(found, about),
        found.doubts, [found.conclusion], shown, about,
    )  # fmt: skip
    if not found.complete:
        raise typer.Exit(INTERRUPTED)
