"""What a pair learns from its texts: costs and acceptance, and whether others use the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from qdraft.decoding.policy.cost_table import CostTable
from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import Round
from qdraft.llama.context import LlamaContext
from qdraft.llama.kv_copy import KvSharing
from qdraft.llama.placed import Placed
from qdraft.llama.spec import Both, PairSpec
from qdraft.session.contention import Contention
from qdraft.session.store import file_facts, load_costs, save_costs, store_path

log = logging.getLogger(__name__)


class Learning:
    """Learns from each round of a pair; ``learned`` holds what the drafting policy uses."""

    def __init__(self, costs: CostTable, placed: Both[Placed], path: Path | None = None) -> None:
        """``path`` is where ``save`` stores the costs; None: nowhere."""
        self.learned = Learned(costs)
        self._path = path
        # Fewer threads help only if the CPU computes. The delays of a link look like contention.
        on_cpu = placed.target.n_offloaded < len(placed.target.layers)
        can_watch = on_cpu and not costs.over_a_link
        self._contention = Contention(costs.target_s) if can_watch else None

    @classmethod
    def fresh(cls, spec: PairSpec, placed: Both[Placed], kv: KvSharing) -> Learning:
        """Start from nothing, and store nothing."""
        return cls(CostTable(over_a_link=bool(placed.target.remote)), placed)

    @classmethod
    def stored(cls, spec: PairSpec, placed: Both[Placed], kv: KvSharing) -> Learning:
        """Start from the costs of earlier runs with the same files, settings and machine."""
        facts = [file_facts(model.path, model.params) for model in spec.models]
        path = store_path("costs", *facts, str(kv.shared))
        return cls(load_costs(path, over_a_link=bool(placed.target.remote)), placed, path)

    def save(self) -> None:
        """Store the costs for later runs, unless they are fresh or the threads have changed."""
        if self._path:
            save_costs(self._path, self.learned.costs)

    def watch(self, round: Round, contexts: Both[LlamaContext]) -> None:
        """Halve the threads if decodes have become slow (see ``session.contention``)."""
        if self._contention is None or not self._contention.add(round):
            return
        n = max(context.n_threads for context in contexts)
        slower = f"decoding takes {self._contention.times_slower:.0f} times as long as before"
        if n == 1:
            log.warning("%s: other programs are using the CPU; there is 1 thread already", slower)
            self._contention = None
            return
        threads = f"{n // 2} thread{'s' if n // 2 > 1 else ''}"
        log.warning("%s: other programs are using the CPU; continuing with %s", slower, threads)
        for context in contexts:
            context.use_threads(max(1, context.n_threads // 2))
        self._contention = Contention()
        self._path = None  # these costs are not those of the next run, which has all threads


# Makes what a pair learns with, once it is loaded: ``Learning.fresh``, ``Learning.stored``.
MakeLearning = Callable[[PairSpec, Both[Placed], KvSharing], Learning]
