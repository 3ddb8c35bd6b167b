"""What to expect of a target that does not fit in memory, before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from qdraft.decoding.policy.model import best_n_draft
from qdraft.decoding.records import MAX_N_DRAFT
from qdraft.gguf.facts import require_model
from qdraft.host import disk_speed
from qdraft.llama.spec import Both, ModelSpec
from qdraft.placement.residency import Residency, find_residency

MEMORY_SPEED = 10e9  # bytes of weights a second that the CPU is assumed to compute with
_GIB = 2**30
# Bits per weight of file types with the embeddings, for Llama 3.1 8B: llama-quantize's own table.
BITS = {
    "Q8_0": 8.5,
    "Q6_K": 6.56,
    "Q5_K_M": 5.7,
    "Q4_K_M": 4.89,
    "Q3_K_M": 4.0,
    "Q2_K": 3.16,
    "IQ2_M": 2.93,
    "IQ2_XXS": 2.38,
}
# Those that are suggested in place of a file that does not fit, the largest first.
_SUGGESTED = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K")


@dataclass(frozen=True, slots=True)
class Outlook:
    """The expected speed of a target that each pass reads from the disk.

    ``disk_speed`` is in bytes a second, measured; None if it cannot be. ``alpha`` is the assumed
    acceptance rate. ``smaller_target`` is the largest file type that would fit with this draft, and
    ``smaller_draft`` one that would fit where this draft does not; each with its bytes, or None.
    """

    residency: Residency
    disk_speed: float | None
    alpha: float
    smaller_target: tuple[str, int] | None = None
    smaller_draft: tuple[str, int] | None = None

    @property
    def pass_s(self) -> float | None:
        """Seconds of one pass over the target."""
        if not self.disk_speed:
            return None
        in_memory = self.residency.target - self.residency.n_streamed
        return self.residency.n_streamed / self.disk_speed + in_memory / MEMORY_SPEED

    @property
    def n_draft(self) -> int:
        """The draft length to expect, if a pass takes the same time for any number of rows."""
        return self._best()[0]

    @property
    def speedup(self) -> float:
        """The speed with the draft over that of the target alone."""
        return self._best()[1]

    @property
    def alone(self) -> float | None:
        """Tokens a second of the target alone."""
        return 1 / self.pass_s if self.pass_s else None

    @property
    def drafted(self) -> float | None:
        """Tokens a second with the draft; None if there is no draft, or it does not fit itself."""
        residency = self.residency
        if not self.alone or not residency.draft or not residency.draft_fits:
            return None
        return self.alone * self.speedup

    def _best(self) -> tuple[int, float]:
        if not self.pass_s:
            return 0, 1.0
        c = self.residency.draft / MEMORY_SPEED / self.pass_s
        flat = dict.fromkeys(range(1, MAX_N_DRAFT + 2), 1.0)
        return best_n_draft(self.alpha, c, flat)


def foresee(
    models: Both[ModelSpec], alpha: float, residency: Residency | None = None
) -> Outlook | None:
    """Return what to expect of these models; None if they fit. Raises ModelFileError."""
    residency = residency or find_residency(models)
    if not residency.n_streamed:
        return None
    facts = require_model(models.target.path)
    sizes = {
        name: int(residency.target * BITS[name] / facts.bits_per_weight) for name in _SUGGESTED
    }
    room = residency.free - residency.margin
    smaller_draft = None
    if residency.draft and not residency.draft_fits:
        smaller_draft = _largest(sizes, room // 2)
    return Outlook(
        residency,
        disk_speed(models.target.path),
        alpha,
        _largest(sizes, min(room - residency.draft, residency.target - 1)),
        smaller_draft,
    )


def _largest(sizes: dict[str, int], n_bytes: int) -> tuple[str, int] | None:
    """Return the first type, the largest one, that takes at most ``n_bytes``."""
    return next(((name, size) for name, size in sizes.items() if size <= n_bytes), None)


def describe(outlook: Outlook) -> str:
    """Say in one line what does not fit, what each pass reads, and the speed to expect."""
    residency = outlook.residency
    needed = (residency.target + residency.draft) / _GIB
    line = (
        f"needs {needed:.1f} GiB of memory, but {residency.free / _GIB:.1f} GiB are free: each "
        f"pass over the target reads {residency.n_streamed / _GIB:.1f} GiB from the disk"
    )
    if outlook.disk_speed and outlook.alone:
        speed = outlook.disk_speed / _GIB
        line += f" at about {speed:.1f} GiB/s, about {_rate(outlook.alone)} t/s alone"
    if outlook.drafted:
        line += f" and {_rate(outlook.drafted)} with the draft"
    return line


def _rate(speed: float) -> str:
    return f"{speed:.2g}"
