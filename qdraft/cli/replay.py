"""`qdraft replay`: what if, on a record of a pair, without the models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.studies import Shown, show_study
from qdraft.decoding.records import DecodeParams, SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.spec import SHARE_KV
from qdraft.render import tune as view
from qdraft.render.progress import Bars
from qdraft.study.recording import load
from qdraft.study.replay import synthetic
from qdraft.study.tune import costs_of, replay_ways, ways

_WHAT_IF = "What if"

Record = Annotated[Path | None, typer.Argument(metavar="[RECORD]", help="Of qdraft tune --record.")]
Alpha = Annotated[
    float | None,
    opt.option(
        _WHAT_IF, "--alpha", help="No record: every token is accepted with this probability."
    ),
]
C = Annotated[
    float | None,
    opt.option(
        _WHAT_IF, "--c", min=0, help="Draft token, in target tokens.", default="as recorded"
    ),
]
V = Annotated[
    str | None,
    opt.option(_WHAT_IF, "--v", help="Decodes by rows, as 2=1.06,8=1.1.", default="as recorded"),
]
Policy = Annotated[
    str | None,
    opt.option(
        _WHAT_IF, "--draft-policy", help="auto, fixed or confidence.", default="all of them"
    ),
]


def replay(
    record: Record = None,
    alpha: Alpha = None,
    c: C = None,
    v: V = None,
    policy: Policy = None,
    n_draft: opt.NDraft = None,
    p_min: opt.PMin = None,
    verify: opt.Verify = "block",
    temperature: opt.Temperature = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    share_kv: opt.ShareKv = "auto",
    output: study.OutputFormat = "table",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    plot: study.PlotFile = None,
    no_plot: study.NoPlot = False,
    report: study.ReportFile = None,
) -> None:
    """Replay drafting on a record: another length, temperature, policy, or another machine's costs.

    The real loop runs on the recorded distributions, so a replay takes seconds and no model.
    """
    shown = Shown(output, as_json, quiet, plot, no_plot, report)
    if (record is None) == (alpha is None):
        raise UsageError("give either a record or --alpha", hint="qdraft tune --record makes one")
    trace = load(record) if record else synthetic(alpha or 0.0)
    sampling = SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if alpha is not None:  # its rows are what they are: nothing is to be cut off or sharpened
        sampling = SamplingParams(1.0, top_k=0, top_p=1, min_p=0)
    costs = study.costs_with(costs_of(trace), c, v)
    if share_kv not in SHARE_KV:
        raise UsageError(f"--share-kv is {share_kv}, but must be {', '.join(SHARE_KV)}")
    sharing = share_kv != "off" and all(text.shared is not None for text in trace.texts)
    if share_kv == "on" and not sharing:
        raise UsageError("the pair of this record does not share its KV cells")
    if policy or n_draft is not None or p_min is not None:
        one = DecodeParams(
            draft_policy=policy or ("auto" if n_draft is None else "fixed"), n_draft=n_draft,
            p_min=p_min, verification=verify,
        )  # fmt: skip
        found = [one]
    else:
        found = [replace(way, verification=verify) for way in ways(0.0)]
    with Bars(quiet=quiet) as bars:
        tried = replay_ways(trace, costs, sampling, found, share_kv=sharing, progress=bars.step)
    show_study(
        "qdraft replay", view.sheets(tried), view.charts(tried, costs),
        view.report(tried, costs, {"record": record, "alpha": alpha, "sampling": sampling}), [],
        [view.words(tried)], shown,
    )  # fmt: skip
