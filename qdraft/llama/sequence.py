"""A sequence: one text in the cache of a context, beside others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qdraft.decoding.engine import n_common
from qdraft.errors import CancelledError, ContextError, EngineError, RollbackError
from qdraft.llama.interrupts import interruptible
from qdraft.llama.native import lib, native_errors

if TYPE_CHECKING:
    from qdraft.llama.context import LlamaContext
    from qdraft.llama.vocab import LlamaVocab


class LlamaSequence:
    """One text in a context's cache; ``LlamaContext.sequence`` opens it.

    Evals of several sequences of one context may interleave. Raises EngineError once it is closed.
    """

    def __init__(self, context: LlamaContext, id: int) -> None:
        self._lib = lib()
        self._tokens: list[int] = []
        self._closed = False
        self.keeps_places = False  # for a recurrent state; KV cells can be cut anywhere
        self.context = context
        self.id = id

    @property
    def vocab(self) -> LlamaVocab:
        return self.context.vocab

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens in the cache, oldest first."""
        return self._tokens

    @property
    def n_past(self) -> int:
        """The number of tokens in the cache."""
        return len(self._tokens)

    @property
    def n_ctx(self) -> int:
        """The number of tokens that the sequence may hold beside the context's other sequences."""
        return self.context.room_of(self)

    def eval(self, tokens: Sequence[int], logits: int) -> NDArray[np.float32]:
        """Decode ``tokens`` after the cached ones; return rows for the last ``logits`` of them.

        The rows have the shape [logits, n_vocab] and are valid until the next eval of any sequence
        of the context. Raises ContextError if the tokens do not fit, CancelledError between two
        batches if the context's ``is_cancelled`` says so, and EngineError if llama.cpp fails.
        """
        self._require_open()
        n, n_ctx = len(tokens), self.n_ctx
        if not 0 <= logits <= min(n, self.context.n_rows):
            raise EngineError(
                f"{logits} rows of {n} tokens are asked for, but a context made for "
                f"{self.context.n_rows} rows has at most {min(n, self.context.n_rows)}"
            )
        if self.n_past + n > n_ctx:
            raise ContextError(f"{self.n_past + n} tokens do not fit the context of {n_ctx}")
        start = 0
        while start < n:
            # Steps of one physical batch, so that Ctrl-C works in a long prompt. All rows that the
            # caller wants come from the last step.
            left = n - start
            step = self.context.step
            size = left if left <= step else min(step, left - logits)
            part = tokens[start : start + size]
            if start and self.context.is_cancelled():
                raise CancelledError("the rest of the tokens was cancelled")
            wanted = logits if size == left else 0
            self.context.slow_pass.expect(start, size, n)
            with interruptible() as interrupted:  # llama.cpp may log, which is a callback
                self._decode(part, wanted, interrupted)
            start += size
        return self.context.rows(logits)

    def _decode(self, tokens: Sequence[int], logits: int, interrupted: Callable[[], bool]) -> None:
        """Decode one step, and note its tokens."""
        self.context.decode(self.id, self.n_past, tokens, logits, interrupted)
        self._tokens += tokens

    def checkpoint(self, n_ahead: int | None = None) -> None:
        """Remember this place: nothing to do, because KV cells can be cut anywhere."""

    def truncate(self, n_past: int) -> None:
        """Cut to the first ``n_past`` tokens; do nothing if there are no more.

        Raises RollbackError if llama.cpp refuses.
        """
        self._require_open()
        if n_past >= self.n_past:
            return
        memory = self.context.memory
        if n_past == 0:
            self._lib.llama_memory_seq_rm(memory, self.id, -1, -1)
        elif not self._lib.llama_memory_seq_rm(memory, self.id, n_past, -1):
            name = self.context.model.path.name
            raise RollbackError(f"{name}: the cache cannot be cut to {n_past} tokens")
        del self._tokens[n_past:]

    def keep(self, tokens: Sequence[int]) -> int:
        """Cut to a common prefix with ``tokens``, the longest that there is a way back to.

        Returns its length.
        """
        self.truncate(n_common(self._tokens, tokens))
        return self.n_past

    def take_over(self, tokens: Sequence[int]) -> None:
        """Note that a KV copy has put the cells of ``tokens`` into the cache."""
        self._tokens[:] = tokens

    @property
    def is_whole(self) -> bool:
        """Tell whether the cache holds what ``tokens`` says; an interrupt may have come between."""
        if self._closed or self.context.closed or self.context.model.has_state:
            return False
        last = self._lib.llama_memory_seq_pos_max(self.context.memory, self.id)
        return int(last) == self.n_past - 1

    def read_cells(self) -> NDArray[np.uint8]:
        """Return all cells as llama.cpp writes them. Raises EngineError if it cannot."""
        self._require_open()
        context = self.context.native
        size = int(self._lib.llama_state_seq_get_size(context, self.id))
        cells = np.empty(size, dtype=np.uint8)
        with interruptible(), native_errors() as errors:
            n = int(self._lib.llama_state_seq_get_data(context, _pointer(cells), size, self.id))
        if not n:
            raise EngineError(f"the KV cells cannot be read: {errors}")
        return cells[:n]

    def write_cells(self, cells: NDArray[np.uint8], tokens: Sequence[int]) -> None:
        """Replace all cells by those of ``tokens``, which ``read_cells`` has returned.

        Raises EngineError if llama.cpp does not take them; the sequence is then empty.
        """
        self._require_open()
        with interruptible(), native_errors() as errors:
            n = self._lib.llama_state_seq_set_data(
                self.context.native, _pointer(cells), cells.nbytes, self.id
            )
            self._tokens[:] = tokens if n else []
        if not self.is_whole:
            self._lib.llama_memory_seq_rm(self.context.memory, self.id, -1, -1)
            self._tokens.clear()
            raise EngineError(f"the KV cells are not those of {len(tokens)} tokens: {errors}")

    def close(self) -> None:
        """Give the id and the cells back to the context; harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if not self.context.closed:
            with suppress(EngineError):  # the memory of a lost server is lost with it
                memory = self.context.memory
                self._lib.llama_memory_seq_rm(memory, self.id, -1, -1, later=True)
        # Last: an interrupt before it loses the id, but no later text meets these cells.
        self.context.release(self)

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError(f"this sequence of {self.context.model.path.name} is closed")
        self.context.native  # noqa: B018 (raises if the context is closed)


def _pointer(cells: NDArray[np.uint8]) -> Any:
    return cells.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
