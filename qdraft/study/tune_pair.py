"""Tuning one target: record each draft, replay, try settings, confirm live, and write it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from qdraft.decoding.policy.model import Costs
from qdraft.decoding.records import SamplingParams
from qdraft.disk import require_space
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.spec import Both, ModelSpec, PairSpec
from qdraft.pairs import editing, registry
from qdraft.pairs.registry import Entry
from qdraft.session.opening import open_spec
from qdraft.session.pair import Pair
from qdraft.study.about import describe_pair
from qdraft.study.prompts import TASK_KINDS, Task, built_in
from qdraft.study.recording import Recording, most_bytes, save
from qdraft.study.settings import Setting, choose_setting, try_settings
from qdraft.study.tune import (
    AUTO,
    Tried,
    choose_winner,
    conclude_tuning,
    confirm,
    list_ways,
    read_costs,
    record_pair,
    replay_ways,
    tuned_settings,
)


@dataclass(frozen=True, slots=True)
class RecordedDraft:
    """A draft, its recording and its costs, and what the replays gave: the fastest way first."""

    draft: Path
    recording: Recording
    costs: Costs
    tried: Sequence[Tried]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What tuning a target found.

    ``recorded`` holds every draft that was tried, the pair's own first, ``best`` the one that
    drafts fastest by the replays. ``tried`` are its ways to draft, those that were confirmed live
    first; ``setting`` is None if no settings were tried.
    """

    recorded: Sequence[RecordedDraft]
    best: RecordedDraft
    settings: Sequence[Setting]
    setting: Setting | None
    tried: Sequence[Tried]

    @property
    def winner(self) -> Tried:
        return choose_winner(self.tried)

    @property
    def conclusion(self) -> list[str]:
        """Sentences: what to run, and how fast it was."""
        return conclude_tuning(self.winner, self.setting, self.best.draft)

    def write(self, target: Path, entry: Entry | None, models_file: Path | None) -> str:
        """Write the winner to models.yaml, and return a sentence that says where.

        ``entry`` is that of the pair that was tuned, None if it has none. If another draft is
        the best, the entry that names it is written.
        """
        draft = self.best.draft
        if entry is None or draft != self.recorded[0].draft:
            entry = find_entry_of_pair(target, draft, models_file)
        if entry is None:
            return "not written: name this pair with qdraft models add, then tune it again"
        day = date.today().isoformat()
        tuned = tuned_settings(self.winner, self.setting, self.conclusion[0], day)
        path = editing.set_tuned(entry, tuned, user_file=models_file)
        return f"written to {path}: qdraft run --pair {entry.name} uses it"


@dataclass(frozen=True, slots=True)
class Tuner:
    """How to tune the drafts of one target: how to open a pair, and what to generate.

    ``spec`` holds a draft; the other drafts are opened with the params of that draft.
    ``recommended`` are the values of ``sampling`` that the target's file recommends.
    """

    spec: PairSpec
    sampling: SamplingParams
    n_predict: int
    progress: Progress = no_progress
    recommended: Mapping[str, float] = field(default_factory=dict)

    def tune(
        self,
        drafts: Sequence[Path],
        n_confirmed: int,
        *,
        with_settings: bool,
        record_file: Path | None = None,
    ) -> Tuning:
        """Record every draft, and confirm the best ``n_confirmed`` ways of the fastest one live.

        ``with_settings`` also tries threads, flash attention and cache types. The recording of the
        fastest draft is written to ``record_file`` as soon as it is known.
        """
        target = self.spec.models.target
        if record_file:
            n_bytes = most_bytes(len(built_in()) * self.n_predict)
            hint = "choose another folder with --record"
            require_space(record_file.parent, n_bytes, "the record", hint)
        recorded = [self.record(draft) for draft in drafts]
        best = max(recorded, key=lambda draft: draft.tried[0].replayed.speedup)
        if record_file:
            save(best.recording, record_file)
        settings: list[Setting] = []
        if with_settings:
            alpha = best.tried[0].replayed.alpha or 0.0
            settings = list(
                try_settings(target.path, best.draft, target.params, alpha, self.progress)
            )
        setting = choose_setting(settings)
        return Tuning(recorded, best, settings, setting, self._confirm(best, n_confirmed, setting))

    def record(self, draft: Path) -> RecordedDraft:
        """Record the pair with this draft, and replay every way to draft."""
        temperature = self.sampling.temperature
        with self._open(draft, self.spec.models.target.params) as pair:
            about = describe_pair(pair, self.spec.models.target.params.n_threads)
            recording = record_pair(
                pair,
                built_in(),
                [temperature],
                self.sampling,
                self.n_predict,
                self.progress,
            )
            about["recommended"] = dict(self.recommended)
            recording = replace(recording, about={**about, **recording.about})
            costs = read_costs(recording)
            assert costs
            tried = replay_ways(
                recording,
                costs,
                self.sampling,
                list_ways(temperature),
                share_kv=pair.kv.shared,
                progress=self.progress,
            )
        return RecordedDraft(draft, recording, costs, tried)

    def _open(self, draft: Path, params: EngineParams) -> Pair:
        models = self.spec.models
        assert models.draft
        draft_params = replace(
            models.draft.params,
            n_threads=params.n_threads,
            n_threads_batch=params.n_threads_batch,
        )
        pair = Both(replace(models.target, params=params), ModelSpec(draft, draft_params))
        return open_spec(replace(self.spec, models=pair), self.progress)

    def _confirm(self, best: RecordedDraft, n: int, setting: Setting | None) -> list[Tried]:
        """Run the best ``n`` ways and auto live, on tasks that were not recorded.

        The ways that were not run follow those that were.
        """
        if not n:
            return list(best.tried)
        tasks = [Task(kind, prompts[1]) for kind, prompts in TASK_KINDS.items()]
        chosen = [*best.tried[:n], *(way for way in best.tried[n:] if way.name == AUTO)]
        with self._open(
            best.draft, setting.params if setting else self.spec.models.target.params
        ) as pair:
            live = confirm(pair, tasks, self.sampling, chosen, self.n_predict, self.progress)
            return [*live, *(way for way in best.tried if way not in chosen)]


def find_other_drafts(target: Path, draft: Path, models_file: Path | None) -> list[Path]:
    """Return the drafts that models.yaml names for this target, except ``draft``."""
    known = [Path(e.draft) for e in registry.find_entries(target, models_file) if e.draft]
    return [other for other in known if not other.samefile(draft)]


def find_entry_of_pair(target: Path, draft: Path, models_file: Path | None) -> Entry | None:
    """Return the entry of models.yaml that names this pair of files; None if there is none."""
    known = registry.find_entries(target, models_file)
    return next((e for e in known if e.draft and Path(e.draft).samefile(draft)), None)
