"""What a pair learns from its texts: costs and acceptance, and whether others use the CPU."""

from __future__ import annotations

import logging
from pathlib import Path

from qdraft.decoding.policy.learned import Learned
from qdraft.decoding.records import Round
from qdraft.llama.context import LlamaContext
from qdraft.llama.placed import Placed
from qdraft.llama.spec import Both, PairSpec
from qdraft.session.contention import Contention
from qdraft.session.store import file_facts, load_costs, save_costs, store_path

log = logging.getLogger(__name__)


class Learning:
    """Learns from each round of a pair; ``learned`` holds what the drafting policy uses.

    Costs start from those of earlier runs with the same files, settings and machine.
    """

    def __init__(self, spec: PairSpec, placed: Both[Placed], *, shared_kv: bool) -> None:
        facts = [file_facts(model.path, model.params) for model in spec.models]
        over_a_link = bool(placed.target.remote)
        self._path: Path | None = store_path("costs", *facts, str(shared_kv))
        costs = load_costs(self._path, over_a_link=over_a_link)
        self.learned = Learned(costs)
        # Fewer threads help only if the CPU computes. The delays of a link look like contention.
        on_cpu = placed.target.n_offloaded < len(placed.target.layers)
        can_watch = on_cpu and not over_a_link
        self._contention = Contention(costs.target_s) if can_watch else None

    def save(self) -> None:
        """Store the costs for later runs."""
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
