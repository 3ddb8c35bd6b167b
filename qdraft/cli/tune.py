"""`qdraft tune`: the fastest way to draft with a pair, confirmed live and written down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from qdraft.cli.opening import find_files, find_named_entry
from qdraft.cli.options.devices import DeviceOptions
from qdraft.cli.options.group import Group, Only, Without, option, takes_options
from qdraft.cli.options.models import ModelOptions
from qdraft.cli.options.output import StudyOutputOptions
from qdraft.cli.options.sampling import SamplingOptions
from qdraft.cli.options.study import TaskOptions
from qdraft.cli.recommendation import PENALTIES, follow
from qdraft.cli.study_view import StudyView, show_study
from qdraft.errors import UsageError
from qdraft.gguf.facts import require_model
from qdraft.llama.rpc import connect
from qdraft.llama.spec import PairSpec
from qdraft.pairs import registry
from qdraft.render import tune as render
from qdraft.render.progress import ProgressBars
from qdraft.study.tune_pair import Tuner, find_other_drafts

_PANEL = "Tuning"
_N_CTX = 2048


@dataclass(frozen=True, kw_only=True)
class TuningOptions(Group):
    """What tuning tries and keeps."""

    record: Annotated[
        Path | None,
        option(_PANEL, "--record", help="Write the record of the pair to this file, for replays."),
    ] = None
    n_confirmed: Annotated[
        int,
        option(
            _PANEL,
            "--confirm",
            min=0,
            max=16,
            help="Number of ways to draft to confirm live, the best first.",
        ),
    ] = 3
    no_settings: Annotated[
        bool,
        option(
            _PANEL,
            "--no-settings",
            help="Keep threads, flash attention and cache types as they are.",
        ),
    ] = False
    no_write: Annotated[bool, option(_PANEL, "--no-write", help="Leave models.yaml unchanged.")] = (
        False
    )


@takes_options
def tune(
    models: Annotated[ModelOptions, Without("no_draft")],
    tasks: Annotated[TaskOptions, Only("n_predict")],
    sampling: Annotated[SamplingOptions, Only("temperature", "top_k", "top_p", "min_p")],
    devices: Annotated[DeviceOptions, Only("threads")],
    tuning: TuningOptions,
    output: StudyOutputOptions,
) -> None:
    """Find the fastest way to draft with a pair.

    qdraft records the pair once, replays every way to draft, and confirms the best ways live. It
    also tries the other drafts that models.yaml names for the target, and settings of this
    machine. It writes the winner and its speed-up to models.yaml, and qdraft run uses it.
    """
    entry = find_named_entry(models)
    options = entry.options if entry else {}
    devices = replace(DeviceOptions.of_entry(options, devices.threads), ctx_size=_N_CTX)
    connect(devices.servers)
    with ProgressBars(quiet=output.quiet) as bars:
        target, draft = find_files(models, entry, devices.threads, bars)
        if draft is None:
            raise UsageError("there is no draft to tune", hint="make one with qdraft make")
        spec = PairSpec.of(
            target,
            draft,
            *devices.engines(),
            share_kv=options.get("share-kv", "auto"),
            template=registry.read_template(entry),
            keep_draft=True,
        )
        chosen, recommended = follow(
            require_model(target).sampling.values,
            sampling,
            without=PENALTIES,
            quiet=output.quiet,
        )
        others = [] if models.draft else find_other_drafts(target, draft, models.models_file)
        tuned = Tuner(spec, chosen, tasks.n_predict, bars.report, recommended).tune(
            [draft, *others],
            tuning.n_confirmed,
            with_settings=not tuning.no_settings,
            record_file=tuning.record,
        )
    sentences = list(tuned.conclusion)
    if not tuning.no_write:
        sentences.append(tuned.write(target, entry, models.models_file))
    about = {
        "record": tuning.record,
        "recommended": recommended,
        "draft": tuned.best.draft,
        "drafts": [
            {"draft": each.draft, "best": render.way_report(each.tried[0])}
            for each in tuned.recorded
        ],
        "settings": tuned.settings,
    }
    view = StudyView(
        "qdraft tune",
        [*render.sheets(tuned.tried), *render.setting_sheets(tuned.settings)],
        render.charts(tuned.tried, tuned.best.costs),
        render.report(tuned.tried, tuned.best.costs, about),
        sentences,
        about=tuned.best.recording.about,
    )
    show_study(view, output)
