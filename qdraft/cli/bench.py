"""`qdraft bench`: a pair on several kinds of tasks, beside the target alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from qdraft.cli.opening import open_described
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.drafting import DraftingOptions
from qdraft.cli.options.group import Defaults, Only, Without, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.study import BenchTaskOptions
from qdraft.cli.recommendation import follow
from qdraft.cli.run import INTERRUPTED
from qdraft.cli.study_view import StudyView, show_study
from qdraft.errors import UsageError
from qdraft.render import bench as render
from qdraft.render.progress import ProgressBars
from qdraft.study.about import describe_pair
from qdraft.study.bench_spec import BenchSpec


@takes_options
def bench(
    models: Annotated[ModelOptions, Without("no_draft")],
    tasks: BenchTaskOptions,
    sampling: Annotated[SamplingOptions, Only("top_k", "top_p", "min_p", "seed"), Defaults(seed=1)],
    drafting: Annotated[DraftingOptions, Without("exact")],
    devices: Annotated[
        DeviceOptions,
        Without("ctx_size_draft", "batch_size", "ubatch_size"),
        Defaults(ctx_size=2048),
    ],
    output: StudyOutputOptions,
) -> None:
    """Measure a pair against the target alone on several kinds of tasks.

    Shows for which tasks and temperatures drafting pays off on this machine, how certain that is,
    and what the cost model predicts.
    """
    spec = BenchSpec(
        tasks.tasks(),
        tasks.parse_temperatures(),
        tasks.repeats,
        tasks.ignore_eos,
        sampling.params(),
        drafting.params(n_predict=tasks.n_predict, seed=max(0, sampling.seed)),
    )
    with open_described(models, devices, drafting, keep_draft=True, quiet=output.quiet) as pair:
        values, own = pair.recommended.values, ("temperature",)  # a bench has its own
        chosen, recommended = follow(values, sampling, without=own, quiet=output.quiet)
        spec = replace(spec, sampling=chosen)
        if pair.draft is None and drafting.kind.needs_draft:
            raise UsageError(
                "there is no draft to measure",
                hint="name one with --model-draft, or use --drafter ngram",
            )
        with ProgressBars(quiet=output.quiet) as bars:
            result = spec.run(pair, bars.report)
        about = {
            **describe_pair(pair, devices.threads),
            **spec.describe(),
            "recommended": recommended,
        }
    view = StudyView(
        "qdraft bench",
        render.sheets(result),
        render.charts(result),
        render.report(result, about),
        [result.conclusion],
        result.doubts,
        about,
    )
    show_study(view, output)
    if not result.complete:
        raise typer.Exit(INTERRUPTED)
