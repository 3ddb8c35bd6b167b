"""Threads, flash attention and cache types: which of them makes a pair fastest on this machine."""

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
from qdraft.llama.progress import Progress
from qdraft.llama.spec import PairSpec
from qdraft.making.costs import measure_costs, seconds_of_one
from qdraft.session.opening import open_spec


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to load a pair. ``per_second`` is what the cost model expects with the draft.

    ``same_output`` is False where the target computes something else: then it is no choice
    between speeds. ``error`` stands for the figures where it does not load.
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
    progress: Progress | None = None,
) -> Iterator[Setting]:
    """Load the pair with each setting in turn and measure it: threads first, then the rest.

    The rest is tried with the best number of threads. alpha is taken to be the same everywhere.
    """
    threads = _threads()
    n_all = len(threads) + 2
    found: list[Setting] = []

    def tried(name: str, how: EngineParams, *, same_output: bool = True) -> Setting:
        if progress:
            progress("trying settings", len(found), n_all)
        found.append(_measure(name, target, draft, how, alpha, same_output=same_output))
        if progress:
            progress("trying settings", len(found), n_all)
        return found[-1]

    for n in threads:
        yield tried(f"{n} threads" if n > 1 else "1 thread", replace(params, n_threads=n))
    base = max(found, key=lambda one: one.per_second).params
    yield tried("without flash attention", replace(base, flash_attn="off"), same_output=False)
    eight = replace(base, cache_type_k="q8_0", cache_type_v="q8_0")
    yield tried("KV cache in q8_0", eight, same_output=False)


def _threads() -> list[int]:
    """One, half and all of the physical cores, and all that the process may use."""
    cores = default_threads()
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return sorted({1, max(1, cores // 2), cores, allowed})


def _measure(
    name: str, target: Path, draft: Path, params: EngineParams, alpha: float, *, same_output: bool
) -> Setting:
    try:
        with open_spec(PairSpec.of(target, draft, params, keep_draft=True)) as pair:
            assert pair.draft_engine
            c, v = measure_costs(pair.target_engine, pair.draft_engine, time.perf_counter)
            target_s = seconds_of_one(pair.target_engine, time.perf_counter)
    except QDraftError as error:
        return Setting(name, params, same_output=same_output, error=str(error))
    n_draft, speed = best_n_draft(alpha, c, v)
    return Setting(name, params, 1 / target_s, c, n_draft, speed / target_s, same_output)


def choose_setting(found: list[Setting]) -> Setting:
    """The fastest of those that compute the same; fewer threads where it makes no difference."""
    same = [one for one in found if one.same_output and not one.error]
    fastest = max(same, key=lambda one: one.per_second)
    near = [one for one in same if one.per_second > 0.97 * fastest.per_second]
    return min(near, key=lambda one: one.params.n_threads)
