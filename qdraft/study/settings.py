"""Threads, flash attention and cache types: the settings that make a pair fastest on a machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from qdraft.decoding.policy.model import best_n_draft
from qdraft.errors import QDraftError
from qdraft.host import default_threads
from qdraft.llama.params import EngineParams
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.spec import PairSpec
from qdraft.making.costs import measure_costs, measure_token_seconds
from qdraft.session.opening import open_spec

_EVEN = 0.97  # share of the fastest from which a setting counts as equally fast


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to load a pair. ``per_second`` is the speed that the cost model expects with a draft.

    ``same_output`` is False if the setting changes what the target computes, not only its speed.
    If ``error`` is set, the pair does not load with this setting, and the figures are 0.
    """

    name: str
    params: EngineParams
    target_per_second: float = 0.0
    c: float = 0.0
    n_draft: int = 0
    per_second: float = 0.0
    same_output: bool = True
    error: str | None = None


def try_settings(
    target: Path,
    draft: Path,
    params: EngineParams,
    alpha: float,
    progress: Progress = no_progress,
) -> Iterator[Setting]:
    """Load the pair with each setting in turn and measure it: threads first, then the rest.

    The rest is tried with the best number of threads. alpha is assumed to be the same everywhere.
    """
    settings = [
        Setting("1 thread" if n == 1 else f"{n} threads", replace(params, n_threads=n))
        for n in _threads()
    ]
    n_all = len(settings) + 2
    measured: list[Setting] = []
    for setting in settings:
        progress("trying settings", len(measured), n_all)
        measured.append(_measure(setting, target, draft, alpha))
        yield measured[-1]
    base = max(measured, key=lambda setting: setting.per_second).params
    others = [
        Setting("without flash attention", replace(base, flash_attn="off"), same_output=False),
        Setting(
            "KV cache in q8_0",
            replace(base, cache_type_k="q8_0", cache_type_v="q8_0"),
            same_output=False,
        ),
    ]
    for i, setting in enumerate(others):
        progress("trying settings", len(measured) + i, n_all)
        yield _measure(setting, target, draft, alpha)
    progress("trying settings", n_all, n_all)


def _threads() -> list[int]:
    """One, half and all of the physical cores, and all that the process may use."""
    cores = default_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return sorted({1, max(1, cores // 2), cores, allowed})


def _measure(setting: Setting, target: Path, draft: Path, alpha: float) -> Setting:
    """The setting with its figures, or with the error that loading the pair gave."""
    spec = PairSpec.of(target, draft, setting.params, keep_draft=True)
    try:
        with open_spec(spec) as pair, pair.sequences() as own:
            assert own.draft
            costs = measure_costs(own.target, own.draft, time.perf_counter)
            target_s = measure_token_seconds(own.target, time.perf_counter)
    except QDraftError as error:
        return replace(setting, error=str(error))
    c = costs.of_model
    n_draft, speedup = best_n_draft(alpha, c, costs.v)
    return replace(
        setting,
        target_per_second=1 / target_s,
        c=c,
        n_draft=n_draft,
        per_second=speedup / target_s,
    )


def choose_setting(settings: list[Setting]) -> Setting | None:
    """The fastest setting with the same output; of equal ones, the one with the fewest threads.

    None if the pair loads with none of them.
    """
    same = [setting for setting in settings if setting.same_output and not setting.error]
    if not same:
        return None
    fastest = max(same, key=lambda setting: setting.per_second)
    near = [setting for setting in same if setting.per_second > _EVEN * fastest.per_second]
    return min(near, key=lambda setting: setting.params.n_threads)
