"""Where the figures of a study come from: files, their placement, the build and the machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from qdraft.llama.placed import describe_placed
from qdraft.session.pair import Pair
from qdraft.session.store import describe_machine


def describe_pair(pair: Pair, n_threads: int) -> dict[str, Any]:
    """Describe a loaded pair and this machine; ``n_threads`` 0 stands for the default number."""
    return {
        "target": asdict(pair.target),
        "draft": asdict(pair.draft) if pair.draft else None,
        "kv": asdict(pair.kv),
        "placed": [describe_placed(placed) for placed in pair.placed],
        **describe_machine(n_threads),
    }
