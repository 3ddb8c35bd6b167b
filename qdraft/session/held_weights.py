"""How much of a target that does not fit stays in memory, found by what each pass reads."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from qdraft.llama.context import LlamaContext
from qdraft.llama.devices import free_memory
from qdraft.llama.held_pages import HeldPages, can_hold
from qdraft.llama.spec import Both, ModelSpec
from qdraft.placement.residency import stretches_to_hold

log = logging.getLogger(__name__)

# Of the memory that is free once both models are loaded: what is held at first, each step of the
# search, and the most that is ever held, because what streams needs room to be read ahead.
_FIRST, _STEP, _MOST = 0.6, 0.1, 0.9
# A step pays off if a pass reads less by this share of it.
_PAYS_OFF = 0.25
# A draft that reads more than this share of its weights in a round is being pushed out of memory.
_DRAFT_READS = 0.05


@dataclass(frozen=True, slots=True)
class _Reads:
    """The bytes that each context has read from the disk so far, and the target's decodes."""

    target: int
    draft: int
    n_decodes: int


class HeldWeights:
    """Holds a part of the target's weights in memory, and finds the largest part that helps.

    Whatever is held need not be read by the next pass. Too much of it leaves no room for the rest,
    or for the draft, which both show as reads from the disk: so the part grows from step to step
    while the target's passes read less and the draft's read nothing.
    """

    def __init__(self, target: ModelSpec, contexts: Both[LlamaContext], n_draft_bytes: int) -> None:
        """``n_draft_bytes`` is the size of the draft's weights, 0 without a draft."""
        self._contexts = contexts
        self._most_draft_reads = _DRAFT_READS * n_draft_bytes
        self._pages = HeldPages(stretches_to_hold(target) if can_hold() else [])
        free = free_memory()
        self._step, self._most = int(_STEP * free), int(_MOST * free)
        self._read_before: float | None = None  # bytes of a target pass before the last step
        self._pages.hold(int(_FIRST * free))
        self._last = self._count()
        if self._pages.refusal:
            log.warning(
                "the system lets qdraft lock %.2f GiB of the target in memory (%s): raise the "
                "limit with ulimit -l, and each pass reads less from the disk",
                self.n_bytes / 2**30,
                self._pages.refusal,
            )

    @property
    def n_bytes(self) -> int:
        """The bytes that are held."""
        return self._pages.n_bytes

    def observe(self) -> None:
        """Look at what the last round read, and hold more or less."""
        now, before = self._count(), self._last
        self._last = now
        if now.draft - before.draft > self._most_draft_reads:
            self._step_back()
        elif n := now.n_decodes - before.n_decodes:
            self._weigh((now.target - before.target) / n)

    def close(self) -> None:
        """Release everything; harmless when repeated."""
        self._pages.close()

    def _weigh(self, n_read: float) -> None:
        """Hold a step more if the last one paid off, given the bytes that a target pass read."""
        if self._read_before is not None and n_read > self._read_before - _PAYS_OFF * self._step:
            self._step_back()
        elif n_read and self.n_bytes + self._step <= self._most:
            self._read_before = n_read
            self._pages.hold(self.n_bytes + self._step)

    def _step_back(self) -> None:
        """Hold a step less, and never as much as now again."""
        self._most = max(0, self.n_bytes - self._step)
        self._read_before = None
        self._pages.hold(self._most)

    def _count(self) -> _Reads:
        target, draft = self._contexts.target, self._contexts.draft
        return _Reads(target.n_read, draft.n_read if draft else 0, target.n_decodes)
