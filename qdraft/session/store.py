"""What was measured on this machine, kept from run to run for the same files and settings."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from qdraft.decoding.engine import Engine
from qdraft.decoding.policy.costs import ENOUGH, CostTable
from qdraft.host import cpu_id, cpu_name, default_threads
from qdraft.llama.devices import devices
from qdraft.llama.native import build_id, library_version
from qdraft.llama.params import EngineParams
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.paths import cache_dir, new_file
from qdraft.session.bit_identity import Exactness, probe_exactness

log = logging.getLogger(__name__)


def described(n_threads: int = 0) -> dict[str, Any]:
    """What figures depend on beside the files, for a report: machine, build, threads, date."""
    return {
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": n_threads or default_threads(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "library": f"llama-cpp-python {library_version()}",
        "build": build_id(),
        "extra_buffers": extra_buffers_are_safe(),
    }


def facts_of(path: Path, params: EngineParams) -> str:
    """All that the costs and the numerics of one loaded file depend on, but for the machine."""
    stat = path.stat()
    n_threads = params.n_threads or default_threads()
    how = replace(
        params,
        n_ctx=None,
        n_threads=n_threads,
        n_threads_batch=params.n_threads_batch or n_threads,
    )
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {how}"


def store_path(kind: str, *facts: str) -> Path:
    """Where figures of a kind are kept for these ``facts``, this build and these devices."""
    others = [f"{one.name} {one.description}" for one in devices() if one.kind != "cpu"]
    told = "\n".join((*facts, build_id(), cpu_id(), *others))
    digest = hashlib.sha256(told.encode()).hexdigest()[:24]
    return cache_dir() / kind / f"{digest}.json"


def load_costs(path: Path, *, over_a_link: bool = False) -> CostTable:
    """The table kept there; an empty one where there is none, or a damaged one."""
    try:
        kept = _load(path)
        target_s = float(kept["target_s"])
        c = {str(source): float(ratio) for source, ratio in kept["c"].items()}
        v = {int(width): float(ratio) for width, ratio in kept["v"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return CostTable(over_a_link=over_a_link)
    if min([target_s, *c.values(), *v.values()]) <= 0:
        return CostTable(over_a_link=over_a_link)
    return CostTable(target_s, c, v, over_a_link=over_a_link)


def save_costs(path: Path, costs: CostTable) -> None:
    """Keep the medians. Where they cannot be written the next run measures again."""
    target_s, c, v = costs.medians(ENOUGH)
    if target_s is not None:
        _save(path, {"target_s": target_s, "c": c, "v": v})


def exactness(target: Engine, facts: str, n_most: int) -> Exactness:
    """What a probe of ``target`` finds (see ``session.bit_identity``), kept under ``facts``."""
    depth = min(target.n_ctx, 1024)  # beyond this the probe does not look
    path = store_path("exact", facts, f"{n_most} {depth}")
    found = load_exactness(path)
    if found is None:
        log.info("trying which batches are bit-identical to one-token decoding (once)")
        found = probe_exactness(target, n_most)
        save_exactness(path, found)
    return found


def load_exactness(path: Path) -> Exactness | None:
    """What a probe found; None where there is nothing, or something damaged."""
    try:
        kept = _load(path)
        found = Exactness(int(kept["n_draft"]), kept["depth"], kept["difference"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.n_draft >= 0 else None


def save_exactness(path: Path, found: Exactness) -> None:
    _save(path, asdict(found))


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _save(path: Path, kept: dict[str, Any]) -> None:
    try:
        with new_file(path) as part:
            part.write_text(json.dumps(kept), encoding="utf-8")
    except OSError as error:
        log.debug("%s cannot be kept: %s", path, error.strerror)
