"""What a pair learns from its texts: costs and acceptance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.learned import Learned
from qdraft.llama.kv_copy import KvSharing
from qdraft.llama.placed import Placed
from qdraft.llama.spec import Both, PairSpec
from qdraft.session.store import file_facts, load_costs, save_costs, store_path


class Learning:
    """Learns from each round of a pair; ``learned`` holds what the drafting policy uses."""

    def __init__(self, costs: CostTable, path: Path | None = None) -> None:
        """``path`` is where ``save`` stores the costs; None: nowhere."""
        self.learned = Learned(costs)
        self._path = path

    @classmethod
    def fresh(cls, spec: PairSpec, placed: Both[Placed], kv: KvSharing) -> Learning:
        """Start from nothing, and store nothing."""
        return cls(CostTable(over_a_link=bool(placed.target.remote)))

    @classmethod
    def stored(cls, spec: PairSpec, placed: Both[Placed], kv: KvSharing) -> Learning:
        """Start from the costs of earlier runs with the same files, settings and machine."""
        facts = [file_facts(model.path, model.params) for model in spec.models]
        path = store_path("costs", *facts, str(kv.shared))
        return cls(load_costs(path, over_a_link=bool(placed.target.remote)), path)

    def save(self) -> None:
        """Store the costs for later runs, unless the pair learns with none stored."""
        if self._path:
            save_costs(self._path, self.learned.costs)


# Makes what a pair learns with, once it is loaded: ``Learning.fresh``, ``Learning.stored``.
MakeLearning = Callable[[PairSpec, Both[Placed], KvSharing], Learning]
