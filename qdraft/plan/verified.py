"""A plan against what llama.cpp says once the pair is loaded so."""

from __future__ import annotations

from dataclasses import dataclass

from qdraft.engine.placing import CPU
from qdraft.pair import LoadProgress, Pair
from qdraft.plan.plan import Plan
from qdraft.types import Share

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of memory of one model on one device, in bytes.

    ``mapped`` bytes of what llama.cpp told are a stretch of the file: see ``Placed``.
    """

    device: str
    model: str
    kind: str  # weights, kv, compute
    planned: int
    told: int
    mapped: int = 0

    @property
    def off(self) -> float:
        """How far the plan is from llama.cpp's figure, as a share of that; 0 within a mapping."""
        if self.told - self.mapped <= self.planned <= self.told:
            return 0.0
        nearest = self.told if self.planned > self.told else self.told - self.mapped
        return abs(self.planned - nearest) / nearest if nearest else 1.0

    @property
    def agrees(self) -> bool:
        return self.off <= TOLERANCE


def verify(plan: Plan, progress: LoadProgress | None = None) -> list[Row]:
    """Load the pair as planned and compare, device by device. Raises what loading raises."""
    with Pair(
        plan.target, plan.draft, plan.params, draft_params=plan.draft_params, progress=progress
    ) as pair:
        placed = pair.placed
    rows = []
    for model, of_model in zip(("target", "draft"), placed, strict=False):
        for use in plan.uses:
            planned: Share = getattr(use, model)
            told = of_model.shares.get(use.device, Share())
            for kind in ("weights", "kv", "compute"):
                sizes = getattr(planned, kind), getattr(told, kind)
                if any(sizes):
                    mapped = of_model.mapped if kind == "weights" and use.device == CPU else 0
                    rows.append(Row(use.device, model, kind, *sizes, mapped))
    return rows
