"""The comparison of a plan with the memory that llama.cpp reports for the loaded pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qdraft.llama.placed import MEMORY_KINDS, Placed, Share
from qdraft.llama.progress import Progress, no_progress
from qdraft.llama.spec import Both, PairSpec
from qdraft.placement.needs import span_of
from qdraft.placement.plan import Plan
from qdraft.session.pair import Pair

TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One kind of memory of one model on one device, in bytes.

    ``reported`` is llama.cpp's figure. If llama.cpp maps weights, it maps a range of the file, from
    the first tensor that the device uses to the last, and reports its ``span``, although the device
    uses only ``planned`` bytes of it. ``repacked`` bytes are copies of some of these weights;
    llama.cpp chooses which.
    """

    device: str
    model: str
    kind: str  # one of MEMORY_KINDS
    planned: int
    reported: int
    span: int | None = None
    repacked: int = 0

    @property
    def off(self) -> float:
        """The difference between the plan and llama.cpp's figure, as a share of that figure."""
        expected = self.planned if self.span is None else self.span
        if self.repacked and self.planned <= self.reported and self.repacked <= self.planned:
            return 0.0
        return abs(expected - self.reported) / self.reported if self.reported else 1.0

    @property
    def agrees(self) -> bool:
        return self.off <= TOLERANCE


def compare_loaded(plan: Plan, progress: Progress = no_progress) -> list[MemoryRow]:
    """Load the pair as planned and compare device by device. Raises what loading raises."""
    with Pair(PairSpec(plan.models), progress) as pair:
        placed = pair.placed
    rows: list[MemoryRow] = []
    for name, (model, of_model) in Both("target", "draft").zip(plan.models.zip(placed)):
        for use in plan.uses:
            planned: Share = getattr(use, name)
            rows += _rows_of(use.device, name, planned, model.path, of_model)
    return rows


def _rows_of(
    device: str, model: str, planned: Share, path: Path, placed: Placed
) -> Iterator[MemoryRow]:
    """Give the rows of one model on one device."""
    reported = placed.shares.get(device, Share())
    for kind in MEMORY_KINDS:
        sizes = getattr(planned, kind), getattr(reported, kind)
        if not any(sizes):
            continue
        mapped = placed.mapped.get(device, 0) if kind == "weights" else 0
        span = span_of(path, placed, device) if mapped else None
        repacked = reported.weights - mapped if mapped else 0
        yield MemoryRow(device, model, kind, *sizes, span, repacked)
