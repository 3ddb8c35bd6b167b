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

# Of the memory that is free once both models are loaded: the least that is left to what streams, at
# first and in the end, as a share and in bytes. With less, what is read ahead is pushed out again.
_LEFT_FIRST, _LEFT_LAST, _LEFT_BYTES = 0.2, 0.1, 256 * 2**20
# Of the same memory: each step of the search.
_STEP = 0.1
# Rounds from one step to the next. A step too far costs up to half a pass, and a step that pays off
# saves a few percent of each.
_N_ROUNDS = 8
# A step pays off if a pass reads less by this share of it.
_PAYS_OFF = 0.25
# So many passes in succession that read more than must be read, by this share of it, show that what
# is read ahead is pushed out again.
_N_EXCESS, _EXCESS = 2, 0.15
# A draft that reads more than this share of its weights in a round is being pushed out of memory.
_DRAFT_READS = 0.05
# The most of a pass that the draft's memory may be taken to cost: computing takes time too.
_MOST_RENT = 0.9


@dataclass(frozen=True, slots=True)
class _Count:
    """The bytes that each context has read from the disk so far, and its decodes."""

    read: int
    n_decodes: int


class HeldWeights:
    """Holds a part of the target's weights in memory, and finds the largest part that helps.

    Whatever is held need not be read by the next pass. Too much of it leaves no room for the rest,
    or for the draft, which both show as reads from the disk: so the part grows from step to step
    while the target's passes read less and the draft's read nothing, and shrinks if they read more
    than what is not held.

    A draft that is not used, because drafting does not pay off, lends its memory to the target.
    """

    def __init__(
        self,
        target: ModelSpec,
        contexts: Both[LlamaContext],
        n_draft_bytes: int,
        draft: HeldPages | None = None,
    ) -> None:
        """``n_draft_bytes`` is the size of the draft's weights, 0 without a draft.

        ``draft`` holds them all, if they can be let go of.
        """
        self._contexts = contexts
        self._most_draft_reads = _DRAFT_READS * n_draft_bytes
        self._draft, self._n_lent = draft, 0
        self._pages = HeldPages(stretches_to_hold(target) if can_hold() else [])
        self._free = free_memory()
        self._step = int(_STEP * self._free)
        self._most = _without(self._free, _LEFT_LAST)
        self._read_before: float | None = None  # bytes of a target pass before the last step
        self._n_rounds = 0  # since the last step
        self._n_excess = 0  # passes that read too much, in succession
        self._pages.hold(_without(self._free, _LEFT_FIRST))
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
        """The bytes of the target that are held."""
        return self._pages.n_bytes

    @property
    def rent(self) -> float:
        """The share of what a pass reads that the target could hold in the draft's memory."""
        n_streamed = self._pages.size - self.n_bytes + self._n_lent
        if self._draft is None or not n_streamed:
            return 0.0
        return min(_MOST_RENT, self._draft.size / n_streamed)

    @property
    def lent(self) -> float | None:
        """What drafting again would cost, in target passes, while the draft's memory is lent.

        None while it is not lent.
        """
        if not self._n_lent:
            return None
        n_streamed = max(self._step, self._pages.size - self.n_bytes)
        return self._n_lent / n_streamed + self.rent

    def observe(self, *, wanted: bool) -> None:
        """Look at what the last round read, and hold more or less.

        ``wanted`` says whether a draft of the model would pay off now.
        """
        now, before = self._count(), self._last
        self._last = now
        read_by_draft = 0
        if now.draft and before.draft:
            read_by_draft = now.draft.read - before.draft.read
            used = now.draft.n_decodes > before.draft.n_decodes
            if self._draft and self._lend(used=used, wanted=wanted):
                return
        if read_by_draft > self._most_draft_reads:
            self._step_back()
        elif n := now.target.n_decodes - before.target.n_decodes:
            self._weigh((now.target.read - before.target.read) / n)

    def close(self) -> None:
        """Release everything; harmless when repeated."""
        self._pages.close()
        if self._draft:
            self._draft.close()

    def _lend(self, *, used: bool, wanted: bool) -> bool:
        """Lend an idle draft's memory to the target, and take it back; True if it changed hands."""
        assert self._draft
        if not (used or wanted or self._n_lent):
            self._n_lent = self._draft.n_bytes
            self._draft.hold(0)
            self._change(self._n_lent)
        elif used and self._n_lent:
            self._change(-self._n_lent)
            self._draft.hold(self._n_lent)
            self._n_lent = 0
        else:
            return False
        return True

    def _change(self, n_bytes: int) -> None:
        """Hold so much more, or less if it is negative, of the target."""
        self._free += n_bytes
        self._most = _without(self._free, _LEFT_LAST)
        self._read_before, self._n_rounds, self._n_excess = None, 0, 0
        self._pages.hold(min(max(0, self.n_bytes + n_bytes), self._most))

    def _weigh(self, n_read: float) -> None:
        """Hold a step more if the last one paid off, given the bytes that a target pass read."""
        if self._read_before is not None and n_read > self._read_before - _PAYS_OFF * self._step:
            self._step_back()
            return
        must_read = self._pages.size - self.n_bytes
        self._n_excess = self._n_excess + 1 if n_read > (1 + _EXCESS) * must_read else 0
        if self._n_excess == _N_EXCESS:
            self._step_back()
            return
        self._read_before = None
        self._n_rounds += 1
        if n_read and self._n_rounds >= _N_ROUNDS and self.n_bytes + self._step <= self._most:
            self._read_before, self._n_rounds = n_read, 0
            self._pages.hold(self.n_bytes + self._step)

    def _step_back(self) -> None:
        """Hold a step less, and never as much as now again."""
        self._most = max(0, self.n_bytes - self._step)
        self._read_before, self._n_rounds, self._n_excess = None, 0, 0
        self._pages.hold(self._most)

    def _count(self) -> Both[_Count]:
        return self._contexts.map(lambda context: _Count(context.n_read, context.n_decodes))


def _without(free: int, share: float) -> int:
    """Return what is left of the free memory without a share of it, or the least for streaming."""
    return max(0, free - max(_LEFT_BYTES, int(share * free)))
