"""`qdraft tune`: the fastest way to draft with a pair, confirmed live and written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated

from qdraft.cli import machine_options as mach
from qdraft.cli import options as opt
from qdraft.cli import study_options as study
from qdraft.cli.opening import Models, entry_of, files_of
from qdraft.cli.studies import Shown, show_study
from qdraft.decoding.records import SamplingParams
from qdraft.errors import UsageError
from qdraft.llama.params import EngineParams
from qdraft.llama.rpc import connect
from qdraft.llama.spec import PairSpec
from qdraft.pairs import editing as file_of_models
from qdraft.pairs import registry
from qdraft.pairs.registry import Entry
from qdraft.render import tune as view
from qdraft.render.progress import Bars
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair
from qdraft.study.prompts import KINDS, Task, built_in
from qdraft.study.recording import Recording, save
from qdraft.study.replay import Costs
from qdraft.study.settings import Setting, choose_setting, try_settings
from qdraft.study.tune import Tried, confirm, costs_of, record_pair, replay_ways, ways

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
        files = files_of(models, entry, threads, bars)
        if files[1] is None:
            raise UsageError("there is no draft to tune", hint="qdraft make makes one")
        work = Work(
            files[0], *machine.engines(2048), share_kv, registry.read_template(entry), sampling,
            n_predict, bars,
        )  # fmt: skip
        others = [] if draft else _other_drafts(files, models_file)
        recorded = [work.record(one) for one in (files[1], *others)]
        found = max(recorded, key=lambda one: one.tried[0].replayed.speedup)
        if record:
            save(found.recording, record)
        settings = [] if no_settings else work.try_settings(found)
        chosen = choose_setting(settings) if settings else None
        tried = work.confirm(found, n_confirmed, chosen)
    winner = view.winner(tried)
    words = view.verdict(winner, chosen, found.draft)
    is_own = found.draft == files[1]
    known = None
    if not no_write:
        known = _entry_to_write(entry, files[0], found.draft, models_file, is_own=is_own)
    drafts = [{"draft": one.draft, "best": one.tried[0]} for one in recorded]
    about = {"record": record, "draft": found.draft, "drafts": drafts, "settings": settings}
    if known:
        told = view.tuned(winner, chosen, words[0], date.today().isoformat())
        where = file_of_models.set_tuned(known, told, user_file=models_file)
        words.append(f"written to {where}: qdraft run --pair {known.name} uses it")
    elif not no_write:
        words.append("not written: qdraft models add names this pair, then tune it again")
    show_study(
        "qdraft tune", [*view.sheets(tried), *view.setting_sheets(settings)],
        view.charts(tried, found.costs), view.report(tried, found.costs, about), [], words, shown,
        found.recording.about,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """A draft, its record and its costs, and what the replays made of it: the fastest first."""

    draft: Path
    recording: Recording
    costs: Costs
    tried: Sequence[Tried]


@dataclass(frozen=True, slots=True)
class Work:
    """What tuning does with one target."""

    target: Path
    params: EngineParams
    draft_params: EngineParams
    share_kv: str
    template: str | None
    sampling: SamplingParams
    n_predict: int
    bars: Bars

    def record(self, draft: Path) -> Recorded:
        """Record the pair with this draft, and replay every way."""
        temperature = self.sampling.temperature
        with self._open(draft, self.params) as pair:
            about = study.about(pair, self.params.n_threads)
            recording = record_pair(
                pair, built_in(), [temperature], self.sampling, self.n_predict, about,
                self.bars.step,
            )  # fmt: skip
            costs = costs_of(recording)
            assert costs
            tried = replay_ways(
                recording, costs, self.sampling, ways(temperature), share_kv=pair.kv.shared,
                progress=self.bars.step,
            )  # fmt: skip
        return Recorded(draft, recording, costs, tried)

    def _open(self, draft: Path, params: EngineParams) -> Pair:
        threads = (params.n_threads, params.n_threads_batch)
        draft_params = replace(self.draft_params, n_threads=threads[0], n_threads_batch=threads[1])
        return open_spec(PairSpec.of(
            self.target, draft, params, draft_params=draft_params, share_kv=self.share_kv,
            template=self.template, keep_draft=True
        ), self.bars.step)  # fmt: skip

    def try_settings(self, found: Recorded) -> list[Setting]:
        alpha = found.tried[0].replayed.alpha or 0.0
        return list(try_settings(self.target, found.draft, self.params, alpha, self.bars.step))

    def confirm(self, found: Recorded, n: int, chosen: Setting | None) -> list[Tried]:
        """The best ``n`` ways and auto live, on prompts not recorded; then all the others."""
        tasks = [Task(kind, prompts[1]) for kind, prompts in KINDS.items()]
        params = chosen.params if chosen else self.params
        if not n:
            return list(found.tried)
        with self._open(found.draft, params) as pair:
            chosen_ways = [*found.tried[:n]]
            chosen_ways += [one for one in found.tried[n:] if one.name == "auto"]
            live = confirm(pair, tasks, self.sampling, chosen_ways, self.n_predict, self.bars.step)
            rest = [one for one in found.tried if one not in chosen_ways]
            return [*live, *rest]


def _other_drafts(files: tuple[Path, Path | None], models_file: Path | None) -> list[Path]:
    """Drafts that models.yaml knows for this target, beside the one that was asked for."""
    known = [Path(e.draft) for e in registry.find_entries(files[0], models_file) if e.draft]
    return [d for d in known if not files[1] or not d.samefile(files[1])]


def _entry_to_write(
    entry: Entry | None, target: Path, draft: Path, models_file: Path | None, *, is_own: bool
) -> Entry | None:
    """The entry that names this pair of files; None where there is none."""
    if entry and is_own:
        return entry
    known = registry.find_entries(target, models_file)
    return next((e for e in known if e.draft and Path(e.draft).samefile(draft)), None)
