"""`qdraft tune`: the fastest way to draft with a pair, confirmed live and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from qdraft.cli import machine_options as mach
from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.opening import Models, entry_of, files_of
from qdraft.cli.studies import Shown, show_study
from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.rpc import connect
from qdraft.llama.spec import PairSpec
from qdraft.pairs import registry
from qdraft.render import tune as view
from qdraft.render.progress import Bars
from qdraft.study.tune_pair import Tuner, find_entry, find_other_drafts

_TUNING = "Tuning"

Record = Annotated[
    Path | None,
    opt.option(_TUNING, "--record", help="Keep the record of the pair there, for replays."),
]
NoSettings = Annotated[
    bool, opt.option(_TUNING, "--no-settings", help="Do not try threads, flash attention, caches.")
]
Confirm = Annotated[
    int, opt.option(_TUNING, "--confirm", min=0, max=16, help="Ways to try live, the best first.")
]
NoWrite = Annotated[bool, opt.option(_TUNING, "--no-write", help="Leave models.yaml as it is.")]


def tune(
    target: opt.Target = None,
    draft: opt.DraftFile = None,
    pair: opt.PairName = None,
    models_file: opt.ModelsFile = None,
    n_predict: study.NPredictStudy = 64,
    temperature: opt.Temperature = 0.8,
    top_k: opt.TopK = 40,
    top_p: opt.TopP = 0.95,
    min_p: opt.MinP = 0.05,
    threads: mach.Threads = 0,
    record: Record = None,
    n_confirmed: Confirm = 3,
    no_settings: NoSettings = False,
    no_write: NoWrite = False,
    output: study.OutputFormat = "table",
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    plot: study.PlotFile = None,
    no_plot: study.NoPlot = False,
    report: study.ReportFile = None,
) -> None:
    """Find the fastest way to draft with a pair: recorded once, replayed offline, confirmed live.

    Tries the other drafts that models.yaml knows for the target, and this machine's settings.
    What wins is written to models.yaml, with what it was measured to bring, and used from then on.
    """
    shown = Shown(output, as_json, quiet, plot, no_plot, report)
    models = Models(target, draft, pair, models_file, False, False)
    sampling = SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    entry = entry_of(models)
    machine = study.machine_of(entry, threads)
    share_kv = entry.options.get("share-kv", "auto") if entry else "auto"
    connect(machine.servers)
    with Bars(quiet=quiet) as bars:
        target_file, draft_file = files_of(models, entry, threads, bars)
        if draft_file is None:
            raise UsageError("there is no draft to tune", hint="make one with qdraft make")
        spec = PairSpec.of(
            target_file,
            draft_file,
            *machine.engines(2048),
            share_kv=share_kv,
            template=registry.read_template(entry),
            keep_draft=True,
        )
        tuner = Tuner(spec, sampling, n_predict, bars.step)
        others = [] if draft else find_other_drafts(target_file, draft_file, models_file)
        tuning = tuner.tune(
            [draft_file, *others],
            n_confirmed,
            with_settings=not no_settings,
            record_file=record,
        )
    best = tuning.best
    sentences = tuning.conclusion
    if not no_write:
        is_own = entry is not None and best.draft == draft_file
        known = entry if is_own else find_entry(target_file, best.draft, models_file)
        if known:
            path = tuning.write(known, models_file)
            sentences.append(f"written to {path}: qdraft run --pair {known.name} uses it")
        else:
            sentences.append(
                "not written: name this pair with qdraft models add, then tune it again"
            )
    about = {
        "record": record,
        "draft": best.draft,
        "drafts": [{"draft": one.draft, "best": one.tried[0]} for one in tuning.recorded],
        "settings": tuning.settings,
    }
    show_study(
        "qdraft tune",
        [*view.sheets(tuning.tried), *view.setting_sheets(tuning.settings)],
        view.charts(tuning.tried, best.costs),
        view.report(tuning.tried, best.costs, about),
        [],
        sentences,
        shown,
        best.recording.about,
    )
