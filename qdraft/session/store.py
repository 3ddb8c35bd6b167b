"""Figures that qdraft has measured on this machine, stored for later runs of the same files."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from qdraft.decoding.engine import TokenSequence
from qdraft.decoding.policy.constants import CONSTANTS
from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.model import Costs
from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.host import cpu_id, cpu_name, default_threads
from qdraft.llama.devices import devices
from qdraft.llama.native import build_id, library_version
from qdraft.llama.params import EngineParams
from qdraft.llama.repack_probe import extra_buffers_are_safe
from qdraft.paths import cache_dir, new_file
from qdraft.session.bit_identity import DEEPEST, BitIdentity, probe_bit_identity

log = logging.getLogger(__name__)

# What reading a damaged file raises: unreadable, no JSON, brackets nested too deep, a number beyond
# a float, or other keys and types than were written.
_DAMAGE = (
    OSError,
    ValueError,
    RecursionError,
    OverflowError,
    KeyError,
    TypeError,
    AttributeError,
)


def describe_machine(n_threads: int = 0) -> dict[str, Any]:
    """Return machine, build, threads and date of a report's figures, by the keys of its JSON."""
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


def file_facts(path: Path, params: EngineParams) -> str:
    """Return a key of what costs and logits of a file depend on, except for the machine."""
    stat = path.stat()
    n_threads = params.n_threads or default_threads()
    resolved = replace(
        params,
        n_ctx=None,
        n_threads=n_threads,
        n_threads_batch=params.n_threads_batch or n_threads,
    )
    adapters = [(Path(name).resolve(), Path(name).stat()) for name, _ in params.lora]
    of_adapters = "".join(f" {file} {each.st_size} {each.st_mtime_ns}" for file, each in adapters)
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {resolved}{of_adapters}"


def store_path(kind: str, *facts: str) -> Path:
    """Return the file for figures of one kind, for these ``facts``, this build and its devices."""
    others = [f"{device.name} {device.description}" for device in devices() if device.kind != "cpu"]
    key = "\n".join((*facts, build_id(), cpu_id(), *others))
    digest = hashlib.sha256(key.encode()).hexdigest()[:24]
    return cache_dir() / kind / f"{digest}.json"


def load_costs(path: Path, *, over_a_link: bool = False) -> CostTable:
    """Return the stored cost table; an empty one if there is none or the file is damaged.

    A file with a cost that is not finite, or not above 0, is damaged.
    """
    try:
        fields = _load(path)
        target_s = float(fields["target_s"])
        c = {str(source): float(ratio) for source, ratio in fields["c"].items()}
        v = {int(width): float(ratio) for width, ratio in fields["v"].items()}
    except _DAMAGE:
        return CostTable(over_a_link=over_a_link)
    costs_are_sound = all(0 < cost < math.inf for cost in (target_s, *c.values(), *v.values()))
    if not costs_are_sound or not all(1 < n <= MAX_N_DRAFT + 1 for n in v):
        return CostTable(over_a_link=over_a_link)
    return CostTable(Costs(c, v, target_s), over_a_link=over_a_link)


def save_costs(path: Path, costs: CostTable) -> None:
    """Store the medians. If they cannot be written, the next run measures again."""
    known = costs.medians(CONSTANTS.n_to_keep)
    if known.target_s is not None:
        _save(path, {"target_s": known.target_s, "c": known.c, "v": known.v})


def find_bit_identity(target: TokenSequence, facts: str, n_most: int, *, n_ctx: int) -> BitIdentity:
    """Return the stored result of ``probe_bit_identity`` for ``facts``; if there is none, probe.

    This stores the result if ``target`` has all ``n_ctx`` tokens of the context to itself.
    """
    path = bit_identity_path(facts, n_most, n_ctx)
    stored = load_bit_identity(path)
    if stored is not None:
        return stored
    log.info("probing once which batches are bit-identical to one-token decoding")
    has_all = target.n_ctx == n_ctx
    probed = probe_bit_identity(target, n_most)
    if has_all:
        save_bit_identity(path, probed)
    return probed


def bit_identity_path(facts: str, n_most: int, n_ctx: int) -> Path:
    """Return the file for the result of a probe."""
    return store_path("exact", facts, f"{n_most} {min(n_ctx, DEEPEST)}")


def load_bit_identity(path: Path) -> BitIdentity | None:
    """Return the stored result of a probe; None if there is none or the file is damaged."""
    try:
        fields = _load(path)
        depth, difference = fields["depth"], fields["difference"]
        stored = BitIdentity(
            int(fields["n_draft"]),
            None if depth is None else int(depth),
            None if difference is None else float(difference),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stored if stored.n_draft >= 0 else None


def save_bit_identity(path: Path, probed: BitIdentity) -> None:
    """Store the result of a probe. If it cannot be written, the next run probes again."""
    _save(path, asdict(probed))


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _save(path: Path, fields: dict[str, Any]) -> None:
    try:
        with new_file(path) as part:
            part.write_text(json.dumps(fields), encoding="utf-8")
    except OSError as error:
        log.debug("%s cannot be written: %s", path, error.strerror)
