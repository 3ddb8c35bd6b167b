"""Measured costs, kept from run to run for the same files, build, machine and settings."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from qdraft.core.costs import ENOUGH, CostTable
from qdraft.paths import cache_dir, new_file

log = logging.getLogger(__name__)


def store_path(*facts: str) -> Path:
    """Where the table of a pair is kept; ``facts`` are all that its costs depend on."""
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return cache_dir() / "costs" / f"{digest}.json"


def load(path: Path) -> CostTable:
    """The table kept there; an empty one where there is none, or a damaged one."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        target_s = float(kept["target_s"])
        c = {str(source): float(ratio) for source, ratio in kept["c"].items()}
        v = {int(width): float(ratio) for width, ratio in kept["v"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return CostTable()
    if min([target_s, *c.values(), *v.values()]) <= 0:
        return CostTable()
    return CostTable(target_s, c, v)


def save(path: Path, costs: CostTable) -> None:
    """Keep the medians. Where they cannot be written the next run measures again."""
    target_s, c, v = costs.medians(ENOUGH)
    if target_s is None:
        return
    try:
        with new_file(path) as part:
            kept = {"target_s": target_s, "c": c, "v": v}
            part.write_text(json.dumps(kept), encoding="utf-8")
    except OSError as error:
        log.debug("the costs cannot be kept in %s: %s", path, error.strerror)
