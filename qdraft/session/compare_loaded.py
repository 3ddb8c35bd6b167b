"""A plan against what llama.cpp says once the pair is loaded so."""

from __future__ import annotations

from dataclasses import dataclass

from qdraft.llama.placed import Share
from qdraft.placement.needs import span_of
from qdraft.placement.plan import Plan
from qdraft.session.pair import LoadProgress, Pair

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of memory of one model on one device, in bytes.

    llama.cpp maps weights as a stretch of the file, from the first tensor that is used on a device
    to the last: ``span`` is what it then tells of ``planned`` bytes. ``repacked`` weights are
    copies of a part of it, and which part is llama.cpp's to choose.
    """

    device: str
    model: str
    kind: str  # weights, kv, compute
    planned: int
    told: int
    span: int | None = None
    repacked: int = 0

    @property
    def off(self) -> float:
        """How far the plan is from llama.cpp's figure, as a share of that."""
        expected = self.planned if self.span is None else self.span
        if self.repacked and self.planned <= self.told and self.repacked <= self.planned:
            return 0.0
        return abs(expected - self.told) / self.told if self.told else 1.0

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
    files = (plan.target, plan.draft)
    for model, path, of_model in zip(("target", "draft"), files, placed, strict=False):
        for use in plan.uses:
            planned: Share = getattr(use, model)
            told = of_model.shares.get(use.device, Share())
            for kind in ("weights", "kv", "compute"):
                sizes = getattr(planned, kind), getattr(told, kind)
                mapped = of_model.mapped.get(use.device, 0) if kind == "weights" else 0
                if any(sizes):
                    span = span_of(path, of_model, use.device) if mapped and path else None
                    repacked = told.weights - mapped if mapped else 0
                    rows.append(Row(use.device, model, kind, *sizes, span, repacked))
    return rows
